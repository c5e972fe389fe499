"""The tree of many rows in memory: as many places for every group of chunks, in each row and head."""

from __future__ import annotations

import functools
from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels._cluster_tree import ClusterTree
from ...types import KVView
from .plant import Planted
from .settings import ClusterSettings

_PLACES = {"unit": "units", "members": "chunks"}
"""By the first word of a tensor's name, what it has places for; the others have some for clusters."""


def empty_tree(settings: ClusterSettings, kv: KVView, rows: int, edges: Tensor, ends: Tensor) -> ClusterTree:
    """A tree with room for one group of every row, and nothing in it."""
    heads, dtype, device = kv.kv_heads, kv.k.dtype, kv.k.device
    units, clusters, chunks = _sizes(settings).values()

    def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros((rows, heads, *sizes), dtype=dtype, device=device)

    return ClusterTree(
        unit_centroids=zeros(units, kv.head_dim, dtype=dtype),
        unit_radii=zeros(units, dtype=torch.float32),
        unit_offsets=zeros(units + 1),
        unit_tokens=zeros(units),
        centroids=zeros(clusters, kv.head_dim, dtype=dtype),
        radii=zeros(clusters, dtype=torch.float32),
        numbers=zeros(clusters),
        offsets=zeros(clusters + 1),
        members=zeros(chunks),
        edges=edges,
        ends=ends,
    )


def groups_of(tree: ClusterTree, settings: ClusterSettings) -> int:
    """How many groups of a row there is room for."""
    return tree.members.shape[2] // settings.group_size


def with_room(tree: ClusterTree, settings: ClusterSettings, rows: int, groups: int) -> ClusterTree:
    """The tree with room for so many rows, and for so many groups of each and an eighth more."""
    more_rows, held = rows - tree.radii.shape[0], groups_of(tree, settings)
    more = groups + groups // 8 - held if groups > held else 0
    if more == 0 and more_rows == 0:
        return tree
    grown = {}
    for name, tensor in tree.tensors().items():
        if tensor.dim() > 2:
            inner = (0, 0) * (tensor.dim() - 3)
            grown[name] = pad(tensor, (*inner, 0, more * _places(name, settings), 0, 0, 0, more_rows))
    return replace(tree, **grown)


def write(
    tree: ClusterTree, settings: ClusterSettings, planted: Planted, slots: Tensor, first: Tensor, counts: Tensor
) -> None:
    """Put groups `[n · H · G, ...]` into their places, in place: those from `first[i]` on of row `slots[i]`.

    `first` and `slots` are int64 `[n]`; `counts`, int64 `[n]`, all chunks of the rows, those of other groups included.
    """
    sizes, heads = _sizes(settings), tree.radii.shape[1]
    number = planted.radii.shape[0] // (len(slots) * heads)
    group = first[:, None] + torch.arange(number, device=slots.device)
    whole, rest = counts // settings.group_size, counts % settings.group_size
    totals = {"chunks": counts, "clusters": whole * sizes["clusters"] + -(-rest // settings.cluster_size)}
    # Numbers inside of a group become numbers of the row.
    bases = {"members": "chunks", "offsets": "chunks", "numbers": "clusters", "unit_offsets": "clusters"}
    for field in fields(planted):
        name = field.name
        values = getattr(planted, name).unflatten(0, (len(slots), heads, number))
        if name in bases:
            values = values + (group * sizes[bases[name]])[:, None, :, None].int()
        if name == "members":
            # Absent ones are read, though not taken: they must be numbers of chunks.
            values = torch.minimum(values, (counts - 1).clamp(min=0).int()[:, None, None, None])
        if "offsets" in name:
            # Groups meet: where the last cluster of one ends, the first of the next one begins.
            values = torch.cat((values[..., :-1].flatten(2), values[:, :, -1, -1:]), dim=2)
            values = torch.minimum(values, totals[bases[name]].int()[:, None, None])
        else:
            values = values.flatten(2, 3)
        _put(getattr(tree, name), values, slots, first * _places(name, settings))


def _put(target: Tensor, values: Tensor, slots: Tensor, first: Tensor) -> None:
    """Let `target[slots[i], :, first[i] : first[i] + w]` be `values[i]` `[H, w, ...]`."""
    width = values.shape[2]
    if slots.is_cpu:
        # Several times as fast as an index, and nothing is waited for.
        for slot, start, one in zip(slots.tolist(), first.tolist(), values, strict=True):
            target[slot, :, start : start + width] = one
        return
    heads = torch.arange(values.shape[1], device=slots.device)[:, None]
    at = first[:, None] + torch.arange(width, device=slots.device)
    target[slots[:, None, None], heads, at[:, None]] = values


@functools.cache
def _sizes(settings: ClusterSettings) -> dict[str, int]:
    """Units, clusters and chunks of a group."""
    clusters = -(-settings.group_size // settings.cluster_size)
    return {"units": settings.units(clusters), "clusters": clusters, "chunks": settings.group_size}


def _places(name: str, settings: ClusterSettings) -> int:
    """How many entries of a tensor belong to a group."""
    return _sizes(settings)[_PLACES.get(name.partition("_")[0], "clusters")]
