"""What follows the two k-means of a group of chunks: its clusters and units in order, with radii."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._cluster_tree import Planted
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels.ordered_clusters import native, reference


def ordered_clusters(
    keys: Tensor,
    labels: Tensor,
    centroids: Tensor,
    parents: Tensor,
    tops: Tensor,
    lengths: Tensor,
    *,
    implementation: Implementation = "auto",
) -> Planted:
    """Put clusters in order of their units, ties by number, and measure how far chunks reach (LycheeCluster, 4.3).

    Radii are float64 distances of keys and centroids as these are stored, rounded so that none is below the exact one;
    implementations may differ by the rounding of a float64 sum, one step of float32. What is absent may be anything:
    chunks of label L, which come last in `members`, and clusters of parent U, which come last of all. Neither counts
    in any radius or length. Only "native" reads labels and parents on the host, and checks them.

    Args:
        keys: float32 `[P, S, d]`, of each group's chunks.
        labels: int64 `[P, S]`, 0 to L: the cluster of each chunk.
        centroids: `[P, L, d]` of the clusters, as they will be stored.
        parents: int64 `[P, L]`, 0 to U: the unit of each cluster.
        tops: `[P, U, d]`, centroids of the units, of the same dtype.
        lengths: int64 `[P, S]`, tokens of each chunk.
        implementation: "native" needs CPU tensors, float32 or bfloat16 centroids and the library that the install
            builds where there is a C compiler. "auto" takes it where it can run, else the reference.

    Returns:
        All of `Planted`, whose integers are int64 and whose unit_centroids are `tops`.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run; on "native" also
            a label or parent that is out of range.
    """
    _check(keys, labels, centroids, parents, tops, lengths)
    chosen = choose("ordered_clusters", implementation, native=lambda: native.refusal(keys, centroids))
    run = native.ordered_clusters if chosen == "native" else reference.ordered_clusters
    return run(keys, labels, centroids, parents, tops, lengths)


def _check(keys: Tensor, labels: Tensor, centroids: Tensor, parents: Tensor, tops: Tensor, lengths: Tensor) -> None:
    if keys.dim() != 3 or centroids.dim() != 3 or tops.dim() != 3:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (keys, centroids, tops))
        raise KernelError(
            f"ordered_clusters: keys, centroids and tops must be [P, S, d], [P, L, d], [P, U, d]: {shapes}"
        )
    problems, chunks, head_dim = keys.shape
    clusters, units = centroids.shape[1], tops.shape[1]
    if min(chunks, clusters, units, head_dim) < 1:
        raise KernelError(
            f"ordered_clusters: S, L, U and d must be at least 1, got {chunks}, {clusters}, {units} and {head_dim}"
        )
    for name, tensor, dtype, shape in (
        ("keys", keys, torch.float32, (problems, chunks, head_dim)),
        ("labels", labels, torch.int64, (problems, chunks)),
        ("centroids", centroids, centroids.dtype, (problems, clusters, head_dim)),
        ("parents", parents, torch.int64, (problems, clusters)),
        ("tops", tops, centroids.dtype, (problems, units, head_dim)),
        ("lengths", lengths, torch.int64, (problems, chunks)),
    ):
        if tensor.dtype != dtype or tensor.shape != shape or tensor.device != keys.device:
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise KernelError(f"ordered_clusters: {name} must be {dtype} {list(shape)} on {keys.device}, got {found}")
    if not centroids.is_floating_point():
        raise KernelError(f"ordered_clusters: centroids must be floating point, got {centroids.dtype}")
