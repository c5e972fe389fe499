"""Planting groups of chunks: fine clusters and coarse units of each, found by k-means of these chunks alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.spherical_kmeans.api import spherical_kmeans
from .settings import ClusterSettings

# One unit in the last place upwards, so that rounding float64 to float32 never shrinks a radius.
_INFLATION = 1 + 2.0**-23


@dataclass(frozen=True, slots=True)
class Planted:
    """Planted groups of at most S chunks in at most L clusters in at most U units; what is absent is 0.

    Attributes:
        unit_centroids, unit_radii, unit_tokens: of each unit; a unit without tokens is absent.
        unit_offsets: `[..., U + 1]`, unit p has clusters `unit_offsets[p]..unit_offsets[p + 1]` of the group.
        centroids, radii: of each cluster.
        numbers: a cluster's number before they were put in order of their units: who wins a tie.
        offsets: `[..., L + 1]`, cluster c has chunks `members[offsets[c]..offsets[c + 1]]` of the group.
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


def plant(keys: Tensor, lengths: Tensor, counts: Tensor, settings: ClusterSettings, dtype: torch.dtype) -> Planted:
    """Planted `[P, ...]` of chunks whose keys are float32 `[P, S, d]` (LycheeCluster, section 4.3).

    Everything above the k-means works on centroids as they are stored, rounded to `dtype`: radii, units, and later
    every bound.

    Args:
        keys: of unit length or zero.
        lengths: int64 `[P, S]`, tokens of each chunk.
        counts: int64 `[P]`, chunks of each group, 0 to S; the others are absent.
    """
    size, device = keys.shape[1], keys.device
    clusters = -(-size // settings.cluster_size)
    units = settings.units(clusters)
    present = (counts + settings.cluster_size - 1) // settings.cluster_size
    # Looked up: a square root would have to be rounded as the host rounds it.
    table = torch.tensor(_units_of(settings, clusters)).to(device, non_blocking=True)
    labels, centroids = spherical_kmeans(keys, clusters, counts=counts, cluster_counts=present)
    stored = centroids.to(dtype)
    of_units = table[present]
    parents, tops = spherical_kmeans(stored.float(), units, counts=present, cluster_counts=of_units)
    tops = tops.to(dtype)
    parents, numbers = parents.sort(dim=1, stable=True)
    stored = _gathered(stored, numbers)
    # An absent chunk's label is one past the last cluster, an absent cluster's one past the last unit.
    labels = pad(numbers.argsort(dim=1), (0, 1), value=clusters).gather(1, labels)
    above = pad(parents, (0, 1), value=units).gather(1, labels)
    ranked, order = labels.flip(1).sort(dim=1, stable=True)
    tokens = torch.zeros((len(keys), units + 1), dtype=torch.int64, device=device).scatter_add_(1, above, lengths)
    return Planted(
        unit_centroids=tops,
        unit_radii=_radii(keys, above, tops),
        unit_tokens=tokens[:, :units].int(),
        unit_offsets=_offsets(parents, units),
        centroids=stored,
        radii=_radii(keys, labels, stored),
        numbers=numbers.int(),
        offsets=_offsets(ranked, clusters),
        members=(size - 1 - order).int(),
    )


@functools.cache
def _units_of(settings: ClusterSettings, clusters: int) -> tuple[int, ...]:
    """Units over 0 to `clusters` clusters."""
    return tuple(settings.units(number) for number in range(clusters + 1))


def _gathered(vectors: Tensor, numbers: Tensor) -> Tensor:
    return vectors.gather(1, numbers[..., None].expand(-1, -1, vectors.shape[2]))


def _radii(vectors: Tensor, labels: Tensor, centers: Tensor) -> Tensor:
    """Largest distance of each center's vectors, float32 `[P, n]`, never below the exact one; label n: of none."""
    distances = distance(vectors, _gathered(pad(centers, (0, 0, 0, 1)), labels))
    radii = distances.new_zeros((len(vectors), centers.shape[1] + 1)).scatter_reduce_(1, labels, distances, "amax")
    return rounded_up(radii[:, :-1])


def distance(one: Tensor, other: Tensor) -> Tensor:
    """In float64, where rounding is far below the inflation of a radius."""
    found: Tensor = torch.linalg.vector_norm(one.double() - other.double(), dim=-1)
    return found


def rounded_up(radii: Tensor) -> Tensor:
    """Float32 that is not below float64 `radii`."""
    return (radii * _INFLATION).float()


def _offsets(ranked: Tensor, count: int) -> Tensor:
    """Where each of `count` labels begins in ascending labels `[P, N]`, and the end: int32 `[P, count + 1]`."""
    labels = torch.arange(count + 1, device=ranked.device).expand(ranked.shape[0], -1).contiguous()
    return torch.searchsorted(ranked, labels).int()
