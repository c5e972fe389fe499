"""Spherical k-means on CPU: an iteration computes only inner products with centroids that have moved."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._kmeans import BLOCK_BYTES, averaged, first_centroids, refill, within


def spherical_kmeans(
    vectors: Tensor, clusters: int, iterations: int, counts: Tensor, cluster_counts: Tensor
) -> tuple[Tensor, Tensor]:
    heads, count, head_dim = vectors.shape
    labels, centroids = torch.full((heads, count), clusters), torch.zeros((heads, clusters, head_dim))
    for head in counts.nonzero()[:, 0].tolist():
        sizes = counts[head : head + 1], cluster_counts[head : head + 1]
        own, made = map(int, sizes)
        found = _clustered(vectors[head : head + 1, :own], made, iterations, *sizes)
        labels[head, :own], centroids[head, :made] = found[0][0], found[1][0]
    return labels, centroids


def _clustered(
    vectors: Tensor, clusters: int, iterations: int, counts: Tensor, cluster_counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Labels `[1, n]` and centroids `[1, l, d]` of one problem `[1, n, d]`, all of which is present."""
    centroids, present = first_centroids(vectors, clusters, counts, cluster_counts), within(cluster_counts, clusters)
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
