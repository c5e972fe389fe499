"""Planting groups of chunks: fine clusters and coarse units of each, found by k-means of these chunks alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.spherical_kmeans.api import spherical_kmeans
from .groups import Groups
from .settings import ClusterSettings

# One unit in the last place upwards, so that rounding float64 to float32 never shrinks a radius.
_INFLATION = 1 + 2.0**-23


@dataclass(frozen=True, slots=True)
class Planted:
    """Planted groups of at most S chunks in at most L clusters in at most U units; what is absent is 0.

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


def plant(keys: Tensor, groups: Groups, settings: ClusterSettings, dtype: torch.dtype) -> Planted:
    """Planted `[P, ...]` of chunks whose keys are float32 `[P, S, d]`, of unit length or zero (section 4.3).

    Everything above the k-means works on centroids as they are stored, rounded to `dtype`: radii, units, and later
    every bound.
    """
    size, clusters = settings.group_size, settings.clusters
    units = settings.units(clusters)
    labels, centroids = spherical_kmeans(keys, clusters, counts=groups.chunks, cluster_counts=groups.clusters)
    stored = centroids.to(dtype)
    parents, tops = spherical_kmeans(stored.float(), units, counts=groups.clusters, cluster_counts=groups.units)
    tops = tops.to(dtype)
    parents, numbers = parents.sort(dim=1, stable=True)
    stored = _gathered(stored, numbers)
    # An absent chunk's label is one past the last cluster, an absent cluster's one past the last unit.
    labels = pad(numbers.argsort(dim=1), (0, 1), value=clusters).gather(1, labels)
    above = pad(parents, (0, 1), value=units).gather(1, labels)
    ranked, order = labels.flip(1).sort(dim=1, stable=True)
    tokens = groups.lengths.new_zeros((len(keys), units + 1)).scatter_add_(1, above, groups.lengths)
    radii, unit_radii = _radii(keys, labels, stored, above, tops)
    return Planted(
        unit_centroids=tops,
        unit_radii=unit_radii,
        unit_tokens=tokens[:, :units],
        unit_offsets=_offsets(parents, units),
        centroids=stored,
        radii=radii,
        numbers=numbers,
        offsets=_offsets(ranked, clusters),
        members=size - 1 - order,
    )


def _gathered(vectors: Tensor, numbers: Tensor) -> Tensor:
    """Vectors `[P, n, d]` of these numbers `[P, m]`: whole rows, several times as fast as numbers one by one."""
    problems, count, head_dim = vectors.shape
    rows = numbers + torch.arange(0, problems * count, count, device=numbers.device)[:, None]
    return vectors.reshape(-1, head_dim).index_select(0, rows.flatten()).view(*numbers.shape, head_dim)


def _radii(vectors: Tensor, labels: Tensor, centers: Tensor, above: Tensor, tops: Tensor) -> tuple[Tensor, Tensor]:
    """Largest distance of each center's vectors, and of each top's, float32 `[P, n]`, never below the exact one.

    A vector whose label is `n` has none: it is measured from any, into a place that is cut off.
    """
    begin = centers.shape[1] + 1
    nodes = torch.cat((centers, centers[:, :1], tops, tops[:, :1]), dim=1)
    numbers = torch.cat((labels, above + begin), dim=1)
    found = _gathered(nodes, numbers).unflatten(1, (2, -1))
    distances = distance(vectors[:, None], found).flatten(1)
    radii = rounded_up(distances.new_zeros(nodes.shape[:2]).scatter_reduce_(1, numbers, distances, "amax"))
    return radii[:, : begin - 1], radii[:, begin:-1]


def distance(one: Tensor, other: Tensor) -> Tensor:
    """In float64, where rounding is far below the inflation of a radius."""
    found: Tensor = torch.linalg.vector_norm(one.double() - other.double(), dim=-1)
    return found


def rounded_up(radii: Tensor) -> Tensor:
    """Float32 that is not below float64 `radii`."""
    return (radii * _INFLATION).float()


def _offsets(ranked: Tensor, count: int) -> Tensor:
    """Where each of `count` labels begins in ascending labels `[P, N]`: int64 `[P, count]`."""
    labels = torch.arange(count, device=ranked.device).expand(ranked.shape[0], -1).contiguous()
    return torch.searchsorted(ranked, labels)
