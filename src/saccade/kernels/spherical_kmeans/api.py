"""Spherical k-means, batched over heads."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._native import library
from saccade.kernels._triton import refusals
from saccade.kernels.spherical_kmeans import cpu, native, reference


def spherical_kmeans(
    vectors: Tensor, clusters: int, *, iterations: int = 10, implementation: Implementation = "auto"
) -> tuple[Tensor, Tensor]:
    """Clusters of each head's vectors by inner product (LycheeCluster, section 4.3; Hornik et al., 2012).

    The first centroids are vectors floor(i * N / L). An iteration gives every vector to the centroid of the largest
    inner product (ties: the lower one); then each empty cluster in turn takes the vector with the smallest inner
    product to its own centroid (ties: the lower one) from a cluster that still has two; then centroids become the
    normalised sums of their members, or stay where that sum is zero. Labels are those of the last iteration.

    Args:
        vectors: float32 `[H, N, d]`, of unit length or zero.
        clusters: L, 1 to N.
        iterations: at least 1.
        implementation: "native" and "cpu" need CPU tensors and skip what cannot have changed, "native" also the library
            that the install builds where there is a C compiler; "triton" needs CUDA tensors. "auto" takes the first
            that can run of these, else the reference.

    Returns:
        labels int64 `[H, N]`; centroids float32 `[H, L, d]`. No cluster is empty.

    Raises:
        KernelError: shapes or dtypes do not fit, or the requested implementation cannot run.
    """
    if vectors.dim() != 3 or vectors.dtype != torch.float32:
        raise KernelError(
            f"spherical_kmeans: vectors must be float32 [H, N, d], got {vectors.dtype} {list(vectors.shape)}"
        )
    if not 1 <= clusters <= vectors.shape[1]:
        raise KernelError(f"spherical_kmeans: clusters must be 1 to {vectors.shape[1]}, got {clusters}")
    if iterations < 1:
        raise KernelError(f"spherical_kmeans: iterations must be at least 1, got {iterations}")
    chosen = choose(
        "spherical_kmeans",
        implementation,
        native=lambda: library.refusal(vectors),
        cpu=lambda: None if vectors.is_cpu else f"the vectors are on {vectors.device}",
        triton=lambda: refusals.refusal(vectors),
    )
    if chosen == "triton":
        from saccade.kernels.spherical_kmeans import triton

        return triton.spherical_kmeans(vectors, clusters, iterations)
    run = {"native": native.spherical_kmeans, "cpu": cpu.spherical_kmeans}.get(chosen, reference.spherical_kmeans)
    return run(vectors, clusters, iterations)
