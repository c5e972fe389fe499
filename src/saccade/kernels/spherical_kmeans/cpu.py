"""Spherical k-means on CPU: an iteration computes only inner products with centroids that have moved."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._kmeans import BLOCK_BYTES, Sizes, averaged, refill


def spherical_kmeans(vectors: Tensor, clusters: int, iterations: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    labels = torch.full(vectors.shape[:2], clusters)
    centroids = vectors.new_zeros(vectors.shape[0], clusters, vectors.shape[2])
    for head, (count, made) in enumerate(zip(*(size.tolist() for size in sizes), strict=True)):
        if count:
            labels[head, :count], centroids[head, :made] = _whole(vectors[head : head + 1, :count], made, iterations)
    return labels, centroids


def _whole(vectors: Tensor, clusters: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Labels and centroids of one problem `[1, n, d]`, all of whose vectors and clusters are there."""
    centroids = vectors[:, torch.arange(clusters) * vectors.shape[1] // clusters]
    present = torch.ones(1, clusters, dtype=torch.bool)
    nearest, own = torch.empty(vectors.shape[:2], dtype=torch.int64), torch.empty(vectors.shape[:2])
    moved, labels = present, nearest
    for _ in range(iterations):
        _refresh(vectors[0], centroids[0], moved[0], nearest[0], own[0])
        labels = refill(nearest, own, present)
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
