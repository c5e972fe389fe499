"""Spherical k-means in C: inner products in tiles, and only those that may have changed a vector's cluster."""

import torch
from torch import Tensor

from saccade.kernels._kmeans import Sizes
from saccade.kernels._native import library as native

_FAILURES = {1: "the shapes do not fit", 2: "out of memory"}


def spherical_kmeans(vectors: Tensor, clusters: int, iterations: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    heads, count, dim = vectors.shape
    labels = torch.empty((heads, count), dtype=torch.int64, device="cpu")
    centroids = torch.empty((heads, clusters, dim), dtype=torch.float32, device="cpu")
    whole = vectors.contiguous()  # lives until the call returns, which holds its address
    call = native.KMeans.pack(
        *native.addresses(whole, *sizes, labels, centroids),
        *(heads, count, dim, clusters, iterations, torch.get_num_threads(), native.widest),
    )
    native.check("spherical_kmeans", native.loaded().saccade_spherical_kmeans(call), _FAILURES)
    return labels, centroids
