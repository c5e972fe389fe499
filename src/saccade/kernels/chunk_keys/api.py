"""Pooling the keys of neighbouring chunks."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_integers
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._gather import locate
from saccade.kernels._native.attention import cache_refusal
from saccade.kernels.chunk_keys import native, reference
from saccade.types import KVView

ChunkPooling = Literal["mean", "max"]


def chunk_keys(
    kvs: Sequence[KVView],
    edges: Tensor,
    *,
    longest: int,
    pooling: ChunkPooling = "mean",
    implementation: Implementation = "auto",
) -> Tensor:
    """The representative key of each chunk (LycheeCluster, section 4.1): pooled, then of unit length.

    Nothing is read on the host, unless the edges lie there.

    Args:
        kvs: the caches of L layers of the same rows, cut alike; what is in none of these chunks does not matter.
        edges: int32 `[B, C + 1]` on the caches' device, ascending logical positions: chunk i of row b is
            `edges[b, i]..edges[b, i + 1]`. Between equal neighbours is no chunk; these may lie outside the row.
        longest: host bound on the tokens of a chunk.
        pooling: "mean" or the elementwise "max".
        implementation: "native" needs a mean, a float32 or bfloat16 CPU cache, head dim a multiple of 16 up to 256,
            int32 rows and the library that the install builds where there is a C compiler; "auto" takes it where it can
            run, else the reference.

    Returns:
        float32 `[L, B, Hkv, C, d]`; zeros where there is no chunk, and a pooled key of zeros stays zero.

    Raises:
        KernelError: shape or dtype of the edges, an unknown pooling, an implementation that cannot run; and on CPU a
            chunk that lies outside its row or is longer than `longest`.
    """
    if pooling not in get_args(ChunkPooling):
        raise KernelError(f"chunk_keys: unknown pooling {pooling!r}; use mean or max")
    pooled = torch.stack([_pooled(kv, edges, longest, pooling, implementation) for kv in kvs])
    lengths = torch.linalg.vector_norm(pooled, dim=-1, keepdim=True)
    return pooled / torch.where(lengths > 0, lengths, 1.0)


def token_keys(kvs: Sequence[KVView], first: Tensor, count: int, end: Tensor) -> Tensor:
    """Keys of `count` neighbouring tokens from `first` on, zeros from `end` on: float32 `[L, B, Hkv, count, d]`.

    Of L layers whose rows are alike; both are int64 `[B]`, logical positions.
    """
    positions = first[:, None] + torch.arange(count + 1, device=first.device)
    edges = torch.minimum(positions, end[:, None]).int()
    if cache_refusal(kvs[0], edges) is None:
        return torch.stack([native.pool(kv, edges) for kv in kvs])
    # Gathered: as a mean of one it takes three times as long (docs/log.md). Where they lie is the same in all layers.
    views, absent = [kv.in_rows() for kv in kvs], positions[:, :-1] >= end[:, None]
    at, (heads, dim) = locate(views[0].rows, positions[:, :-1], views[0].page), views[0].k.shape[2:]
    keys = torch.empty((len(views), len(first), heads, count, dim), dtype=torch.float32, device=first.device)
    for target, kv in zip(keys, views, strict=True):
        target.copy_(kv.k[at].transpose(1, 2))
        if kv.k_scale is not None:
            target.mul_(kv.k_scale.expand(heads)[:, None, None])
    return keys.masked_fill_(absent[:, None, :, None], 0.0)


def _pooled(kv: KVView, edges: Tensor, longest: int, pooling: ChunkPooling, implementation: Implementation) -> Tensor:
    """Pooled keys `[B, Hkv, C, d]`, not yet of unit length."""
    _check(kv, edges, longest)
    slow = None if pooling == "mean" else f"pooling={pooling} has a reference alone"
    if choose("chunk_keys", implementation, native=lambda: slow or cache_refusal(kv, edges)) == "native":
        return native.pool(kv, edges)
    return reference.pool(kv.in_rows(), edges, longest, pooling)


def _check(kv: KVView, edges: Tensor, longest: int) -> None:
    check_integers("chunk_keys", edges=edges)
    batch = kv.rows.batch
    if edges.dim() != 2 or edges.shape[0] != batch or edges.shape[1] < 2 or edges.device != kv.k.device:
        raise KernelError(
            f"chunk_keys: edges must be [{batch}, 2 or more] on {kv.k.device}, "
            f"got {list(edges.shape)} on {edges.device}"
        )
    if longest < 1:
        raise KernelError(f"chunk_keys: longest must be at least 1, got {longest}")
    if not edges.is_cpu:
        return
    starts, stops = edges[:, :-1], edges[:, 1:]
    outside = (starts < 0) | (stops > kv.rows.seq_lens[:, None]) | (stops - starts > longest)
    wrong = (stops < starts) | (outside & (stops > starts))
    if wrong.any():
        row, chunk = (int(place) for place in wrong.nonzero()[0])
        start, stop = edges[row, chunk : chunk + 2].tolist()
        raise KernelError(
            f"chunk_keys: chunk {chunk} of row {row} is {start}..{stop}; edges must ascend from 0 or more to at most "
            f"{int(kv.rows.seq_lens[row])}, by at most {longest}"
        )
