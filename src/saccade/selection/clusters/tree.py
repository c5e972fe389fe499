"""The tree of many rows in memory: as many places for every group of chunks, in each row and head."""

from __future__ import annotations

import functools
from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels._cluster_tree import ClusterTree, Planted
from ..index import KeySizes
from .groups import Groups
from .settings import ClusterSettings

_PLACES = {"unit": "units", "members": "chunks"}
"""By the first word of a tensor's name, what it has places for; the others have some for clusters."""

_COUNTED = {"members": "chunks", "offsets": "chunks", "numbers": "clusters", "unit_offsets": "clusters"}
"""What a tensor's numbers are numbers of."""

_BEYOND = 2**31 - 1


def empty_tree(
    settings: ClusterSettings, keys: KeySizes, rows: int, edges: Tensor, ends: Tensor, groups: int = 1
) -> ClusterTree:
    """A tree with room for so many groups of every row, and nothing in it."""
    units, clusters, chunks = (groups * places for places in _sizes(settings).values())

    def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros((rows, keys.heads, *sizes), dtype=dtype, device=keys.device)

    return ClusterTree(
        unit_centroids=zeros(units, keys.head_dim, dtype=keys.dtype),
        unit_radii=zeros(units, dtype=torch.float32),
        unit_offsets=zeros(units + 1),
        unit_tokens=zeros(units),
        centroids=zeros(clusters, keys.head_dim, dtype=keys.dtype),
        radii=zeros(clusters, dtype=torch.float32),
        numbers=zeros(clusters),
        offsets=zeros(clusters + 1),
        members=zeros(chunks),
        edges=edges,
        ends=ends,
    )


def groups_of(tree: ClusterTree, settings: ClusterSettings) -> int:
    """How many groups of a row there is room for."""
    return tree.members.shape[2] // settings.replant


def part_of(tree: ClusterTree, start: int, slots: int) -> ClusterTree:
    """The tree of some slots; shares memory."""
    own = {name: held[start : start + slots] for name, held in tree.tensors().items() if held.dim() > 2}
    return replace(tree, **own)


def with_room(tree: ClusterTree, settings: ClusterSettings, layers: int, slots: int, groups: int) -> ClusterTree:
    """The tree of so many layers with room for `slots` of each, and for so many groups of a slot and an eighth more."""
    more_slots, held = slots - tree.radii.shape[0] // layers, groups_of(tree, settings)
    more = groups + groups // 8 - held if groups > held else 0
    if more == 0 and more_slots <= 0:
        return tree
    grown = {}
    for name, tensor in tree.tensors().items():
        if tensor.dim() > 2:
            inner = (0, 0) * (tensor.dim() - 3)
            wider = (*inner, 0, more * _places(name, settings), 0, 0, 0, max(more_slots, 0))
            grown[name] = pad(tensor.unflatten(0, (layers, -1)), wider).flatten(0, 1)
    return replace(tree, **grown)


def write(tree: ClusterTree, settings: ClusterSettings, planted: Planted, groups: Groups) -> None:
    """Put planted groups into their places, in place."""
    for field in fields(planted):
        name, values = field.name, getattr(planted, field.name)
        counted = _COUNTED.get(name)
        if counted is not None:
            # Numbers inside of a group become numbers of the row.
            values = values + groups.before[counted]
        if name == "members":
            # Absent ones are read, though not taken: they must be numbers of chunks.
            values = torch.minimum(values, groups.latest)
        values = values.reshape(len(groups.slots), tree.radii.shape[1], -1, *values.shape[2:])
        if counted is not None and "offsets" in name:
            # Where the last of a group ends, the first of the next one begins; of the last group the row ends.
            values = torch.minimum(pad(values, (0, 1), value=_BEYOND), groups.totals[counted])
        _put(getattr(tree, name), values, groups, _places(name, settings))


def _put(target: Tensor, values: Tensor, groups: Groups, places: int) -> None:
    """Let `target[slots[i], :, first[i] · places :]` begin with `values[i]` `[H, w, ...]`."""
    width = values.shape[2]
    if groups.places is not None:
        # Several times as fast as an index.
        for (slot, first), one in zip(groups.places, values, strict=True):
            target[slot, :, first * places : first * places + width] = one
        return
    heads = torch.arange(values.shape[1], device=target.device)[:, None]
    at = groups.first[:, None] * places + torch.arange(width, device=target.device)
    target[groups.slots[:, None, None], heads, at[:, None]] = values.to(target.dtype)


@functools.cache
def _sizes(settings: ClusterSettings) -> dict[str, int]:
    """Units, clusters and chunks of a group."""
    clusters = settings.clusters
    return {"units": settings.units(clusters), "clusters": clusters, "chunks": settings.replant}


def _places(name: str, settings: ClusterSettings) -> int:
    """How many entries of a tensor belong to a group."""
    return _sizes(settings)[_PLACES.get(name.partition("_")[0], "clusters")]
