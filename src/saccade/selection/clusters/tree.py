"""The trees of many slots in many layers: as many places for every group of chunks, in each slot and head."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels._cluster_tree import ClusterTree, Planted
from ..index import KeySizes
from .groups import Groups
from .settings import ClusterSettings

_COUNTED = {"members": "chunks", "offsets": "chunks", "numbers": "clusters", "unit_offsets": "clusters"}
"""What a tensor's numbers are numbers of."""

_BEYOND = 2**31 - 1


def empty_trees(
    settings: ClusterSettings, keys: KeySizes, layers: int, edges: Tensor, ends: Tensor, groups: int = 1
) -> ClusterTree:
    """Trees of so many layers, `[L, R, H, ...]`, with room for so many groups of every slot, and nothing in them."""
    clusters, chunks = groups * settings.clusters, groups * settings.replant
    units = groups * settings.units(settings.clusters)

    def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros((layers, len(ends), keys.heads, *sizes), dtype=dtype, device=keys.device)

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


def of_layer(trees: ClusterTree, layer: int) -> ClusterTree:
    """The tree of one; shares memory."""
    return replace(trees, **{name: held[layer] for name, held in own(trees).items()})


def own(trees: ClusterTree) -> dict[str, Tensor]:
    """What is not of all layers."""
    return {name: held for name, held in trees.tensors().items() if held.dim() > 2}


def groups_of(trees: ClusterTree, settings: ClusterSettings) -> int:
    """How many groups of a slot there is room for."""
    return trees.members.shape[-1] // settings.replant


def arranged(trees: ClusterTree, settings: ClusterSettings, slots: Tensor, groups: int) -> ClusterTree:
    """Slot `i` is what slot `slots[i]` was (int64 `[S']`), empty if there was none, with room for so many groups."""
    have, moved = groups_of(trees, settings), {}
    for name, tensor in own(trees).items():
        inner = (0, 0) * (tensor.dim() - 4)
        places = (tensor.shape[3] - ("offsets" in name)) // have
        moved[name] = pad(tensor, (*inner, 0, max(groups - have, 0) * places, 0, 0, 0, 1)).index_select(1, slots)
    return replace(trees, **moved)


def write(trees: ClusterTree, first: int, settings: ClusterSettings, planted: Planted, groups: Groups) -> None:
    """Put what was planted of some layers, from `first` on, into its places."""
    slots, (count, width), heads = groups.slots, groups.numbers.shape, trees.radii.shape[2]
    for field in fields(planted):
        name, values = field.name, getattr(planted, field.name).unflatten(0, (-1, count, heads, width))
        counted, places = _COUNTED.get(name), values.shape[4]
        if counted is not None:
            # Numbers inside of a group become numbers of the slot.
            each = settings.replant if counted == "chunks" else settings.clusters
            values = values + groups.numbers[:, None, :, None] * each
        if name == "members":
            # Absent ones are read, though not taken: they must be numbers of chunks.
            values = torch.minimum(values, (groups.totals["chunks"] - 1).clamp(min=0)[:, None, None, None])
        values = values.flatten(3, 4)
        if counted is not None and "offsets" in name:
            # Where the last of a group ends, the first of the next one begins; of the last group the slot ends.
            values = torch.minimum(pad(values, (0, 1), value=_BEYOND), groups.totals[counted][:, None, None])
        put(getattr(trees, name)[first : first + len(values)], values, slots, groups.numbers[:, 0] * places)


def put(target: Tensor, values: Tensor, slots: Tensor, start: Tensor) -> None:
    """Write `[L, n, H, w, ...]` into the slots of `[L, R, H, N, ...]` from a place on; both are int64 `[n]`."""
    width = values.shape[3]
    if slots.is_cpu:
        # Several times as fast as an index.
        for number, (slot, place) in enumerate(zip(slots.tolist(), start.tolist(), strict=True)):
            target[:, slot, :, place : place + width] = values[:, number]
        return
    head = torch.arange(target.shape[2], device=target.device)[:, None]
    at = (start[:, None] + torch.arange(width, device=target.device))[:, None]
    target[:, slots[:, None, None], head, at] = values.to(target.dtype)
