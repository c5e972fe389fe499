"""The trees of many slots in many layers: as many places for every group of chunks, in each slot and head."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..index import KeySizes
from .groups import Groups
from .settings import ClusterSettings

_COUNTED = {"members": "chunks", "offsets": "chunks", "numbers": "clusters", "unit_offsets": "clusters"}
"""What a tensor's numbers are numbers of."""

_BEYOND = 2**31 - 1
# One unit in the last place upwards, so that rounding float64 to float32 never shrinks a radius.
_INFLATION = 1 + 2.0**-23


@dataclass(frozen=True, slots=True)
class Planted:
    """Planted groups of at most S chunks in at most L clusters in at most U units; numbers of what is absent are 0.

    Attributes:
        unit_centroids, unit_radii, unit_tokens: of each unit; a unit without tokens is absent.
        unit_offsets: `[..., U]`, the first cluster of each unit in the group.
        centroids, radii: of each cluster.
        numbers: a cluster's number before they were put in order of their units: who wins a tie.
        offsets: `[..., L]`, the first of each cluster's members in the group.
        members: of a cluster the latest first.
    """

    unit_centroids: Tensor
    unit_radii: Tensor
    unit_offsets: Tensor
    unit_tokens: Tensor
    centroids: Tensor
    radii: Tensor
    numbers: Tensor
    offsets: Tensor
    members: Tensor


@dataclass(frozen=True, slots=True)
class ClusterTree(Planted):
    """Slots of one index each, which rows of a batch enter and leave: coarse units over clusters over chunks of tokens.

    A unit without tokens is none, wherever it lies: nothing else of it means anything. A unit's clusters are
    neighbours; chunks lie in order of position.

    Attributes:
        unit_centroids, unit_radii: `[R, H, P, d]` in the cache's dtype and float32 `[R, H, P]`.
        unit_offsets: int32 `[R, H, P + 1]`, unit p has clusters `unit_offsets[p]..unit_offsets[p + 1]`.
        unit_tokens: int32 `[R, H, P]`, tokens in a unit's chunks.
        centroids, radii: `[R, H, L, d]` and `[R, H, L]` of the clusters, likewise.
        numbers: int32 `[R, H, L]`.
        offsets: int32 `[R, H, L + 1]`, cluster c has chunks `members[offsets[c]..offsets[c + 1]]`.
        members: int32 `[R, H, C]`, numbers of chunks.
        edges: int32 `[R, E]`, as many as there are or more: chunk i has logical positions `edges[i]..edges[i + 1]`.
        ends: int32 `[R]`, where the last chunk ends; 0 where nothing is indexed.
    """

    edges: Tensor
    ends: Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(ClusterTree)}

    def heads(self, start: int, stop: int) -> ClusterTree:
        """The tree of KV heads `start..stop`; shares memory."""
        return ClusterTree(**{**self.tensors(), **{name: tensor[:, start:stop] for name, tensor in own(self).items()}})


def distance(one: Tensor, other: Tensor) -> Tensor:
    """In float64, where rounding is far below the inflation of a radius."""
    found: Tensor = torch.linalg.vector_norm(one.double() - other.double(), dim=-1)
    return found


def rounded_up(radii: Tensor) -> Tensor:
    """Float32 that is not below float64 `radii`."""
    return (radii * _INFLATION).float()


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
