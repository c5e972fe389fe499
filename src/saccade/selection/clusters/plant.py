"""Planting groups of chunks: fine clusters and coarse units of each, found by k-means of these chunks alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels._cluster_tree import Planted
from ...kernels.spherical_kmeans.api import spherical_kmeans
from .groups import Groups
from .ordered import ordered_clusters
from .settings import ClusterSettings


def plant(keys: Tensor, groups: Groups, settings: ClusterSettings, dtype: torch.dtype) -> Planted:
    """Planted `[P, ...]` of n · G groups in L layers of H heads (section 4.3): P = L · n · H · G.

    `keys` of chunks are float32 `[L, n, H, G · S, d]`, of unit length or zero. Everything above the k-means works on
    centroids as they are stored, rounded to `dtype`: radii, units, and later every bound.
    """
    layers, _, heads, _, head_dim = keys.shape
    keys, lengths = keys.view(-1, settings.replant, head_dim), groups.edges.long().diff(dim=1)
    chunks, clusters, units, lengths = (
        groups.repeated(numbers, layers, heads)
        for numbers in (groups.chunks, groups.clusters, groups.units, lengths.unflatten(1, (-1, settings.replant)))
    )
    labels, centroids = spherical_kmeans(keys, settings.clusters, counts=chunks, cluster_counts=clusters)
    stored = centroids.to(dtype)
    parents, tops = spherical_kmeans(
        stored.float(), settings.units(settings.clusters), counts=clusters, cluster_counts=units
    )
    return ordered_clusters(keys, labels, stored, parents, tops.to(dtype), lengths)
