"""Spherical k-means in plain torch: fixed shapes, no host synchronisation."""

import torch
from torch import Tensor

from saccade.kernels._kmeans import Sizes, averaged, first_centroids, member_sums, refill, within


def spherical_kmeans(vectors: Tensor, clusters: int, iterations: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    centroids, present = first_centroids(vectors, clusters, sizes)
    absent = ~within(sizes[0], vectors.shape[1])
    labels = torch.empty(0, dtype=torch.int64, device=vectors.device)
    for _ in range(iterations):
        products = (vectors @ centroids.transpose(1, 2)).masked_fill_(~present[:, None], -torch.inf)
        own, nearest = products.max(dim=2)
        labels = refill(nearest.masked_fill_(absent, clusters), own, present)
        centroids = averaged(vectors, labels, centroids)
    return labels, centroids


def member_means(vectors: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    sums, sizes = member_sums(vectors, labels, count)
    there = sizes.clamp(min=1)
    means = sums / there[..., None]
    away = means.gather(1, labels.clamp(max=count - 1)[..., None].expand(-1, -1, vectors.shape[2]))
    squares, _ = member_sums(away.sub_(vectors).square_().sum(-1, keepdim=True), labels, count)
    return means, (squares[..., 0] / there).sqrt(), sizes
