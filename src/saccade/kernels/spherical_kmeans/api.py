"""Spherical k-means, batched over heads."""

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._native import library
from saccade.kernels._triton import refusals
from saccade.kernels.spherical_kmeans import native, reference


def spherical_kmeans(
    vectors: Tensor,
    clusters: int,
    *,
    counts: Tensor | None = None,
    cluster_counts: Tensor | None = None,
    iterations: int = 10,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """Clusters of each problem's vectors by inner product (LycheeCluster, section 4.3; Hornik et al., 2012).

    The first centroids are vectors floor(i * N / L). An iteration gives every vector to the centroid of the largest
    inner product (ties: the lower one); then each empty cluster in turn takes the vector with the smallest inner
    product to its own centroid (ties: the lower one) from a cluster that still has two; then centroids become the
    normalised sums of their members, or stay where that sum is zero. Labels are those of the last iteration.

    With counts, problem p is that of its first counts[p] vectors alone, and absent ones may be anything. Only "native"
    reads counts on the host, and checks them.

    Args:
        vectors: float32 `[P, N, d]`, of unit length or zero; problems are heads, or groups of each head's vectors.
        clusters: L, 1 to N.
        counts: int32 or int64 `[P]` on the vectors' device, 0 to N; None: N of every problem.
        cluster_counts: likewise, 1 to min(L, counts[p]), or 0 where counts[p] is 0; given if and only if counts are.
        iterations: at least 1.
        implementation: "native" needs CPU tensors and the library that the install builds where there is a C compiler,
            "triton" CUDA tensors, N up to 8,192 and d up to 256; "auto" takes what can run of these, or the reference.

    Returns:
        labels int64 `[P, N]`, L if absent; centroids float32 `[P, L, d]`, zeros if absent. No present one is empty.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run.
    """
    if vectors.dim() != 3 or vectors.dtype != torch.float32:
        raise KernelError(
            f"spherical_kmeans: vectors must be float32 [P, N, d], got {vectors.dtype} {list(vectors.shape)}"
        )
    if not 1 <= clusters <= vectors.shape[1]:
        raise KernelError(f"spherical_kmeans: clusters must be 1 to {vectors.shape[1]}, got {clusters}")
    if iterations < 1:
        raise KernelError(f"spherical_kmeans: iterations must be at least 1, got {iterations}")
    if (counts is None) != (cluster_counts is None):
        raise KernelError("spherical_kmeans: counts and cluster_counts must be given together")
    limit = vectors.shape[1]
    sizes = _sizes("counts", counts, vectors, limit), _sizes("cluster_counts", cluster_counts, vectors, clusters)
    chosen = choose(
        "spherical_kmeans", implementation, native=lambda: library.refusal(vectors), triton=lambda: _refusal(vectors)
    )
    if chosen == "triton":
        from saccade.kernels.spherical_kmeans import triton

        return triton.spherical_kmeans(vectors, clusters, iterations, sizes)
    if chosen == "reference":
        return reference.spherical_kmeans(vectors, clusters, iterations, sizes)
    for number, (count, made) in enumerate(zip(*(size.tolist() for size in sizes), strict=True)):
        if not min(count, 1) <= made <= min(clusters, count) <= count <= limit:
            raise KernelError(
                f"spherical_kmeans: problem {number} has {made} clusters of {count} vectors; counts must be 0 to "
                f"{limit}, cluster_counts 1 to min({clusters}, count), or 0 where the count is 0"
            )
    return native.spherical_kmeans(vectors, clusters, iterations, sizes)


def member_means(
    vectors: Tensor, labels: Tensor, count: int, *, implementation: Implementation = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Means of sets of vectors: keys of tokens, of which attention mass is estimated.

    Args:
        vectors: float32 `[P, N, d]`.
        labels: int64 `[P, N]`, the set of each, 0 to `count`; of what is in none `count`, and it may be anything.
        count: sets of a problem.
        implementation: "triton" needs what it needs for `spherical_kmeans`; "auto" takes it where it can run, else the
            reference.

    Returns:
        means float32 `[P, count, d]`, zeros where a set is empty; spreads float32 `[P, count]`, root of the mean
        squared distance from it; members int32 or int64 `[P, count]`.

    Raises:
        KernelError: shapes or dtypes do not fit, or the requested implementation cannot run.
    """
    if vectors.dim() != 3 or vectors.dtype != torch.float32 or labels.shape != vectors.shape[:2]:
        told = f"{vectors.dtype} {list(vectors.shape)} and labels {list(labels.shape)}"
        raise KernelError(f"member_means: vectors must be float32 [P, N, d] and labels [P, N], got {told}")
    if choose("member_means", implementation, triton=lambda: _refusal(vectors)) == "triton":
        from saccade.kernels.spherical_kmeans import triton

        return triton.member_means(vectors, labels, count)
    return reference.member_means(vectors, labels, count)


def _refusal(vectors: Tensor) -> str | None:
    large = vectors.shape[1] > 8192 or vectors.shape[2] > refusals.MOST_DIM
    return refusals.refusal(vectors) or (f"vectors are {list(vectors.shape)}" if large else None)


def _sizes(name: str, given: Tensor | None, vectors: Tensor, whole: int) -> Tensor:
    """What every problem has, int64 `[P]`: all where nothing was given."""
    problems, device = vectors.shape[0], vectors.device
    if given is None:
        return torch.full((problems,), whole, device=device)
    if given.shape != (problems,) or given.dtype not in (torch.int32, torch.int64) or given.device != device:
        found = f"{given.dtype} {list(given.shape)} on {given.device}"
        raise KernelError(f"spherical_kmeans: {name} must be int32 or int64 [{problems}] on {device}, got {found}")
    return given.long().contiguous()
