"""Pooling the keys of neighbouring chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_integers
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._flat import cpu_refusal
from saccade.kernels._kmeans import normalised
from saccade.kernels._pooling import RunPooling
from saccade.kernels._triton import refusals
from saccade.kernels.chunk_keys import cpu, reference
from saccade.types import KVView

ChunkPooling = Literal["mean", "max"]


def chunk_keys(
    kv: KVView,
    edges: Tensor,
    *,
    longest: int,
    pooling: ChunkPooling = "mean",
    implementation: Implementation = "auto",
) -> Tensor:
    """The representative key of each chunk (LycheeCluster, section 4.1): pooled, then of unit length.

    Nothing is read on the host, unless the edges lie there.

    Args:
        kv: the cache; what is in none of these chunks does not matter.
        edges: int32 `[B, C + 1]` on the cache's device, ascending logical positions: chunk i of row b is
            `edges[b, i]..edges[b, i + 1]`. Between equal neighbours is no chunk; these may lie outside the row.
        longest: host bound on the tokens of a chunk.
        pooling: "mean" or the elementwise "max".
        implementation: "cpu" needs a CPU cache of whole rows; "triton" a CUDA device, for float8_e4m3fn one of compute
            capability 8.9. "auto" takes the first that can run of these, else the reference.

    Returns:
        float32 `[B, Hkv, C, d]`; zeros where there is no chunk, and a pooled key of zeros stays zero.

    Raises:
        KernelError: shape or dtype of the edges, an unknown pooling, an implementation that cannot run; and on CPU a
            chunk that lies outside its row or is longer than `longest`.
    """
    if pooling not in get_args(ChunkPooling):
        raise KernelError(f"chunk_keys: unknown pooling {pooling!r}; use mean or max")
    (pooled,) = _pooled("chunk_keys", kv, edges, longest, (pooling,), implementation)
    return normalised(pooled, pooled)


def chunk_bounds(
    kv: KVView, edges: Tensor, *, longest: int, implementation: Implementation = "auto"
) -> tuple[Tensor, Tensor]:
    """Elementwise minimum and maximum of each chunk's keys: Quest's bounds of a page (ReSA, section 2.1) for any cut.

    Arguments and errors are those of `chunk_keys`.

    Returns:
        Lower and upper bounds, float32 `[B, Hkv, C, d]`, which hold the keys' own numbers; zeros where is no chunk.
    """
    lower, upper = _pooled("chunk_bounds", kv, edges, longest, ("min", "max"), implementation)
    return lower, upper


def _pooled(
    operation: str,
    kv: KVView,
    edges: Tensor,
    longest: int,
    poolings: Sequence[RunPooling],
    implementation: Implementation,
) -> Sequence[Tensor]:
    """Chunks pooled in each of the ways, `[B, Hkv, C, d]`; their keys are read once."""
    _check(operation, kv, edges, longest)
    chosen = choose(
        operation,
        implementation,
        cpu=lambda: cpu_refusal(kv),
        triton=lambda: refusals.refusal(kv.k, kv.rows.seq_lens) or refusals.dtype_refusal("a tensor", kv.k),
    )
    if chosen == "triton":
        from saccade.kernels.chunk_keys import triton

        return triton.pool(kv, edges, poolings)
    if chosen == "cpu":
        return cpu.pool(kv, edges, poolings)
    return reference.pool(kv, edges, longest, poolings)


def _check(operation: str, kv: KVView, edges: Tensor, longest: int) -> None:
    check_integers(operation, edges=edges)
    batch = kv.rows.batch
    if edges.dim() != 2 or edges.shape[0] != batch or edges.shape[1] < 2 or edges.device != kv.k.device:
        raise KernelError(
            f"{operation}: edges must be [{batch}, 2 or more] on {kv.k.device}, "
            f"got {list(edges.shape)} on {edges.device}"
        )
    if longest < 1:
        raise KernelError(f"{operation}: longest must be at least 1, got {longest}")
    if not edges.is_cpu:
        return
    starts, stops = edges[:, :-1], edges[:, 1:]
    outside = (starts < 0) | (stops > kv.rows.seq_lens[:, None]) | (stops - starts > longest)
    wrong = (stops < starts) | (outside & (stops > starts))
    if wrong.any():
        row, chunk = (int(place) for place in wrong.nonzero()[0])
        start, stop = edges[row, chunk : chunk + 2].tolist()
        raise KernelError(
            f"{operation}: chunk {chunk} of row {row} is {start}..{stop}; edges must ascend from 0 or more to at most "
            f"{int(kv.rows.seq_lens[row])}, by at most {longest}"
        )
