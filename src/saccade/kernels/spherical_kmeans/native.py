"""Spherical k-means in C: inner products in tiles, and only those that may have changed a vector's cluster."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._native import library as native

_FAILURES = {1: "the shapes do not fit", 2: "out of memory"}


def refusal(vectors: Tensor) -> str | None:
    """Why the library cannot take this call, or None."""
    if native.library() is None:
        return "no library was built at install (a C compiler is needed)"
    return None if vectors.is_cpu else f"the vectors are on {vectors.device}"


def spherical_kmeans(vectors: Tensor, clusters: int, iterations: int) -> tuple[Tensor, Tensor]:
    heads, count, dim = vectors.shape
    labels = torch.empty((heads, count), dtype=torch.int64)
    centroids = torch.empty((heads, clusters, dim), dtype=torch.float32)
    whole = vectors.contiguous()  # lives until the call returns, which holds its address
    call = native.KMeans(
        whole.data_ptr(),
        labels.data_ptr(),
        centroids.data_ptr(),
        *(heads, count, dim, clusters, iterations, torch.get_num_threads(), native.widest),
    )
    found = native.library()
    assert found is not None, "refusal was asked"
    failure = found.saccade_spherical_kmeans(ctypes.addressof(call))
    if failure:
        raise KernelError(f"spherical_kmeans: {_FAILURES.get(failure, failure)}")
    return labels, centroids
