"""The two-level index of LycheeCluster as tensors: coarse units over fine clusters over chunks of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# One unit in the last place upwards, so that rounding float64 to float32 never shrinks a radius.
_INFLATION = 1 + 2.0**-23


@dataclass(frozen=True, slots=True)
class ClusterTree:
    """Slots of one index each, which rows of a batch enter and leave.

    A unit without tokens is none, wherever it lies: nothing else of it means anything. A unit's clusters are
    neighbours; chunks lie in order of position.

    Attributes:
        unit_centroids, unit_radii: `[R, H, P, d]` in the cache's dtype and float32 `[R, H, P]`.
        unit_offsets: int32 `[R, H, P + 1]`, unit p has clusters `unit_offsets[p]..unit_offsets[p + 1]`.
        unit_tokens: int32 `[R, H, P]`, tokens in a unit's chunks.
        centroids, radii: `[R, H, L, d]` and `[R, H, L]` of the clusters, likewise.
        numbers: int32 `[R, H, L]`, a cluster's number before they were put in order: who wins a tie.
        offsets: int32 `[R, H, L + 1]`, cluster c has chunks `members[offsets[c]..offsets[c + 1]]`.
        members: int32 `[R, H, C]`, numbers of chunks, of a cluster the latest first.
        edges: int32 `[R, E]`, as many as there are or more: chunk i has logical positions `edges[i]..edges[i + 1]`.
        ends: int32 `[R]`, where the last chunk ends; 0 where nothing is indexed.
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
    edges: Tensor
    ends: Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ClusterTree.__slots__}

    def heads(self, start: int, stop: int) -> ClusterTree:
        """The tree of KV heads `start..stop`; shares memory."""
        per_head = {name: tensor[:, start:stop] for name, tensor in self.tensors().items() if tensor.dim() > 2}
        return ClusterTree(**{**per_head, "edges": self.edges, "ends": self.ends})


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
    unit_tokens: Tensor
    unit_offsets: Tensor
    centroids: Tensor
    radii: Tensor
    numbers: Tensor
    offsets: Tensor
    members: Tensor


def distance(one: Tensor, other: Tensor) -> Tensor:
    """In float64, where rounding is far below the inflation of a radius."""
    found: Tensor = torch.linalg.vector_norm(one.double() - other.double(), dim=-1)
    return found


def rounded_up(radii: Tensor) -> Tensor:
    """Float32 that is not below float64 `radii`."""
    return (radii * _INFLATION).float()


class SearchWidths(NamedTuple):
    """Host bounds on what a search meets; narrower loses candidates.

    Clusters of the units that are kept, chunks that fit beside what is always attended to, tokens of a set.
    """

    clusters: int
    chunks: int
    tokens: int
