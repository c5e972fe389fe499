"""The two-level index of LycheeCluster as tensors: coarse units over fine clusters over chunks of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ClusterTree:
    """Padded over rows: what a row does not have is zero, so that it is a unit or cluster without chunks.

    Clusters lie in order of their unit, so that a unit's clusters are neighbours; chunks lie in order of position.

    Attributes:
        unit_centroids, unit_radii: `[B, H, P, d]` in the cache's dtype and float32 `[B, H, P]`.
        unit_offsets: int32 `[B, H, P + 1]`, unit p has clusters `unit_offsets[p]..unit_offsets[p + 1]`.
        unit_tokens: int32 `[B, H, P]`, tokens in a unit's chunks.
        centroids, radii: `[B, H, L, d]` and `[B, H, L]` of the clusters, likewise.
        numbers: int32 `[B, H, L]`, a cluster's number before they were put in order: who wins a tie.
        offsets: int32 `[B, H, L + 1]`, cluster c has chunks `members[offsets[c]..offsets[c + 1]]`.
        members: int32 `[B, H, C]`, numbers of chunks, ascending within a cluster.
        edges: int32 `[B, C + 1]`, chunk i has logical positions `edges[i]..edges[i + 1]`.
        ends: int32 `[B]`, where the last chunk ends; 0 for a row that is not indexed.
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
        return dict(zip(_NAMES, _values(self), strict=True))

    def heads(self, start: int, stop: int) -> ClusterTree:
        """The tree of KV heads `start..stop`; shares memory."""
        per_head = {name: tensor[:, start:stop] for name, tensor in self.tensors().items() if tensor.dim() > 2}
        return ClusterTree(**{**per_head, "edges": self.edges, "ends": self.ends})


_NAMES = tuple(ClusterTree.__annotations__)
# Asked for in every layer of every step: five times as fast as going through the fields.
_values = attrgetter(*_NAMES)


class SearchWidths(NamedTuple):
    """Host bounds on what a search meets; wider is slower, narrower loses candidates.

    Attributes:
        clusters: clusters of the units that are kept.
        chunks: chunks that fit into the budget beside what is always attended to.
        tokens: tokens of a set.
    """

    clusters: int
    chunks: int
    tokens: int
