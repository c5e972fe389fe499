"""Planting groups of chunks: fine clusters and coarse units of each, found by k-means of these chunks alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels._cluster_tree import Planted
from ...kernels.ordered_clusters.api import ordered_clusters
from ...kernels.spherical_kmeans.api import spherical_kmeans
from .groups import Groups
from .settings import ClusterSettings


def plant(keys: Tensor, groups: Groups, settings: ClusterSettings, dtype: torch.dtype) -> Planted:
    """Planted `[P, ...]` of chunks whose keys are float32 `[P, S, d]`, of unit length or zero (section 4.3).

    Everything above the k-means works on centroids as they are stored, rounded to `dtype`: radii, units, and later
    every bound.
    """
    clusters = settings.clusters
    labels, centroids = spherical_kmeans(keys, clusters, counts=groups.chunks, cluster_counts=groups.clusters)
    stored = centroids.to(dtype)
    parents, tops = spherical_kmeans(
        stored.float(), settings.units(clusters), counts=groups.clusters, cluster_counts=groups.units
    )
    return ordered_clusters(keys, labels, stored, parents, tops.to(dtype), groups.lengths)
