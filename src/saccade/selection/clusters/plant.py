"""Planting groups of chunks: fine clusters and units of each, by k-means of these alone, in order and with radii."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.spherical_kmeans.api import spherical_kmeans
from .groups import Groups
from .settings import ClusterSettings
from .tree import Planted, distance, rounded_up


def plant(keys: Tensor, groups: Groups, settings: ClusterSettings, dtype: torch.dtype) -> Planted:
    """Planted `[P, ...]` of n · G groups in L layers of H heads (section 4.3): P = L · n · H · G.

    `keys` of chunks are float32 `[L, n, H, G · S, d]`, of unit length or zero. Everything above the k-means works on
    centroids as they are stored, rounded to `dtype`: radii, units, and later every bound.
    """
    layers, _, heads, _, head_dim = keys.shape
    keys, lengths = keys.view(-1, settings.replant, head_dim), groups.edges.long().diff(dim=1)
    # What is told of each group, `[n, G, ...]`, for all layers and heads: `[P, ...]`.
    chunks, clusters, units, lengths = (
        numbers[:, None].expand(layers, -1, heads, *numbers.shape[1:]).flatten(0, 3)
        for numbers in (groups.chunks, groups.clusters, groups.units, lengths.unflatten(1, (-1, settings.replant)))
    )
    labels, centroids = spherical_kmeans(keys, settings.clusters, counts=chunks, cluster_counts=clusters)
    stored = centroids.to(dtype)
    parents, tops = spherical_kmeans(
        stored.float(), settings.units(settings.clusters), counts=clusters, cluster_counts=units
    )
    return ordered_clusters(keys, labels, stored, parents, tops.to(dtype), lengths)


def ordered_clusters(
    keys: Tensor, labels: Tensor, centroids: Tensor, parents: Tensor, tops: Tensor, lengths: Tensor
) -> Planted:
    """Put clusters in order of their units, ties by number, and measure how far chunks reach (LycheeCluster, 4.3).

    Radii are float64 distances of keys and centroids as these are stored, rounded so that none is below the exact one.
    What is absent may be anything: chunks of label L, which come last in `members`, and clusters of parent U, which
    come last of all. Neither counts in any radius or length.
    """
    clusters, units = centroids.shape[1], tops.shape[1]
    parents, numbers = parents.sort(dim=1, stable=True)
    centroids = _gathered(centroids, numbers)
    # An absent chunk's label is one past the last cluster, an absent cluster's one past the last unit.
    labels = pad(numbers.argsort(dim=1), (0, 1), value=clusters).gather(1, labels)
    above = pad(parents, (0, 1), value=units).gather(1, labels)
    ranked, order = labels.flip(1).sort(dim=1, stable=True)
    tokens = lengths.new_zeros((len(keys), units + 1)).scatter_add_(1, above, lengths)
    radii, unit_radii = _radii(keys, labels, centroids, above, tops)
    return Planted(
        unit_centroids=tops,
        unit_radii=unit_radii,
        unit_tokens=tokens[:, :units],
        unit_offsets=_offsets(parents, units),
        centroids=centroids,
        radii=radii,
        numbers=numbers,
        offsets=_offsets(ranked, clusters),
        members=keys.shape[1] - 1 - order,
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
    distances = distance(vectors[:, None], _gathered(nodes, numbers).unflatten(1, (2, -1))).flatten(1)
    radii = rounded_up(distances.new_zeros(nodes.shape[:2]).scatter_reduce_(1, numbers, distances, "amax"))
    return radii[:, : begin - 1], radii[:, begin:-1]


def _offsets(ranked: Tensor, count: int) -> Tensor:
    """Where each of `count` labels begins in ascending labels `[P, N]`: int64 `[P, count]`."""
    labels = torch.arange(count, device=ranked.device).expand(ranked.shape[0], -1).contiguous()
    return torch.searchsorted(ranked, labels)
