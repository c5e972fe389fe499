"""Spherical k-means on CPU: an iteration computes only inner products with centroids that have moved."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._kmeans import BLOCK_BYTES, averaged, first_centroids, refill


def spherical_kmeans(vectors: Tensor, clusters: int, iterations: int) -> tuple[Tensor, Tensor]:
    heads = vectors.shape[0]
    centroids = first_centroids(vectors, clusters)
    nearest, own = torch.empty(vectors.shape[:2], dtype=torch.int64), torch.empty(vectors.shape[:2])
    moved = torch.ones(heads, clusters, dtype=torch.bool)
    labels = nearest
    for _ in range(iterations):
        for head in range(heads):
            _refresh(vectors[head], centroids[head], moved[head], nearest[head], own[head])
        labels = refill(nearest, own, clusters)
        updated = averaged(vectors, labels, centroids)
        moved = (updated != centroids).any(dim=2)
        centroids = updated
        if not moved.any():
            break  # every further iteration would repeat this one
    return labels, centroids


def _refresh(vectors: Tensor, centroids: Tensor, moved: Tensor, nearest: Tensor, own: Tensor) -> None:
    """Bring each vector's nearest centroid up to date with those of one head that have moved, in place."""
    numbers = moved.nonzero()[:, 0]
    if 2 * numbers.shape[0] > centroids.shape[0]:
        best = _nearest(vectors, centroids)
        own.copy_(best[0])
        nearest.copy_(best[1])
        return
    if numbers.shape[0] == 0:
        return
    # Who has lost its centroid looks at all again; the others compare theirs with the moved ones.
    lost = moved[nearest]
    values, places = _nearest(vectors, centroids.index_select(0, numbers))
    found = numbers[places]
    better = (values > own) | ((values == own) & (found < nearest))
    own.copy_(torch.where(better, values, own))
    nearest.copy_(torch.where(better, found, nearest))
    again = lost.nonzero()[:, 0]
    if again.shape[0] > 0:
        own[again], nearest[again] = _nearest(vectors.index_select(0, again), centroids)


def _nearest(vectors: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The largest inner product of each of `vectors [n, d]` and the lowest centroid that has it, `[n]` each."""
    block = max(1, BLOCK_BYTES // (4 * centroids.shape[0]))
    targets = centroids.t()
    best = [torch.mm(vectors[start : start + block], targets).max(dim=1) for start in range(0, len(vectors), block)]
    return torch.cat([part.values for part in best]), torch.cat([part.indices for part in best])
