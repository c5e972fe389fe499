"""Spherical k-means in plain torch: fixed shapes, no host synchronisation, the inner products in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._kmeans import BLOCK_BYTES, Sizes, averaged, first_centroids, refill, within


def spherical_kmeans(vectors: Tensor, clusters: int, iterations: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    centroids, present = first_centroids(vectors, clusters, sizes)
    absent = ~within(sizes[0], vectors.shape[1])
    labels = torch.empty(0, dtype=torch.int64, device=vectors.device)
    for _ in range(iterations):
        nearest, own = _nearest(vectors, centroids, present)
        labels = refill(nearest.masked_fill_(absent, clusters), own, present)
        centroids = averaged(vectors, labels, centroids)
    return labels, centroids


def _nearest(vectors: Tensor, centroids: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """The present centroid of largest inner product and that product, `[H, N]` each."""
    heads, count, _ = vectors.shape
    block = max(1, BLOCK_BYTES // (4 * heads * centroids.shape[1]))
    targets, absent = centroids.transpose(1, 2), ~present[:, None]
    best = [
        (vectors[:, start : start + block] @ targets).masked_fill_(absent, -torch.inf).max(dim=2)
        for start in range(0, count, block)
    ]
    return torch.cat([part.indices for part in best], dim=1), torch.cat([part.values for part in best], dim=1)
