"""Pooling the keys of neighbouring chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._flat import cpu_refusal, host_bounds
from saccade.kernels._kmeans import normalised
from saccade.kernels._pooling import RunPooling
from saccade.kernels._triton import refusals
from saccade.kernels.chunk_keys import cpu, reference
from saccade.types import KVView

ChunkPooling = Literal["mean", "max"]

_BLOCK = 4096
"""Tokens whose keys are copied at a time."""


def chunk_keys(
    kv: KVView,
    row: int,
    edges: Sequence[int],
    *,
    pooling: ChunkPooling = "mean",
    implementation: Implementation = "auto",
) -> Tensor:
    """The representative key of each chunk of a row (LycheeCluster, section 4.1): pooled, then of unit length.

    Args:
        kv: the cache; only slots of these chunks are read.
        row: batch row.
        edges: host integers, strictly ascending logical positions: chunk i is `edges[i]..edges[i + 1]`.
        pooling: "mean" or the elementwise "max".
        implementation: "cpu" needs a CPU cache of whole rows; "triton" a CUDA device, for float8_e4m3fn one of compute
            capability 8.9. "auto" takes the first that can run of these, else the reference.

    Returns:
        float32 `[Hkv, len(edges) - 1, d]`; a pooled key of zeros stays zero.

    Raises:
        KernelError: edges that do not ascend inside the row, an unknown pooling, or an implementation that cannot run.
    """
    if pooling not in get_args(ChunkPooling):
        raise KernelError(f"chunk_keys: unknown pooling {pooling!r}; use mean or max")
    (pooled,) = _pooled("chunk_keys", kv, row, edges, (pooling,), implementation)
    return normalised(pooled, pooled)


def chunk_bounds(
    kv: KVView, row: int, edges: Sequence[int], *, implementation: Implementation = "auto"
) -> tuple[Tensor, Tensor]:
    """Elementwise minimum and maximum of each chunk's keys: Quest's bounds of a page (ReSA, section 2.1) for any cut.

    Arguments and errors are those of `chunk_keys`.

    Returns:
        Lower and upper bounds, float32 `[Hkv, len(edges) - 1, d]`, which hold the keys' own numbers.
    """
    lower, upper = _pooled("chunk_bounds", kv, row, edges, ("min", "max"), implementation)
    return lower, upper


def _pooled(
    operation: str,
    kv: KVView,
    row: int,
    edges: Sequence[int],
    poolings: Sequence[RunPooling],
    implementation: Implementation,
) -> list[Tensor]:
    """Chunks pooled in each of the ways, `[Hkv, C, d]`; their keys are read once."""
    length = host_bounds(kv.rows)[row][1]
    if len(edges) < 2 or edges[0] < 0 or edges[-1] > length or any(stop <= start for start, stop in pairwise(edges)):
        raise KernelError(f"{operation}: edges must ascend from 0 or more to at most {length}, two or more of them")
    chosen = choose(
        operation,
        implementation,
        cpu=lambda: cpu_refusal(kv),
        triton=lambda: refusals.refusal(kv.k, kv.rows.seq_lens) or refusals.dtype_refusal("a tensor", kv.k),
    )
    if chosen == "triton":
        from saccade.kernels.chunk_keys import triton

        return triton.pool(kv, row, edges, poolings)
    use = cpu if chosen == "cpu" else reference
    blocks = [use.pool(kv, row, block, poolings) for block in _blocks(edges)]
    return [torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True)]


def _blocks(edges: Sequence[int]) -> list[list[int]]:
    """The edges in runs of about a block of tokens; neighbouring runs share an edge."""
    blocks, first = [], 0
    for last in range(1, len(edges)):
        if last == len(edges) - 1 or edges[last + 1] - edges[first] > _BLOCK:
            blocks.append(list(edges[first : last + 1]))
            first = last
    return blocks
