"""Queries that share a KV head, and pooling of runs of neighbouring rows of a matrix, without atomics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

RunPooling = Literal["mean", "max", "min"]


def grouped(q: Tensor, kv_heads: int) -> Tensor:
    """Queries `[B, Hq, d]` by the KV head that they read, float32 `[B, Hkv, g, d]`."""
    batch, heads, head_dim = q.shape
    return q.float().reshape(batch, kv_heads, heads // kv_heads, head_dim)


def pool_runs(tokens: Tensor, edges: Sequence[int], pooling: RunPooling) -> Tensor:
    """Mean, maximum or minimum of rows `edges[i]..edges[i + 1]` (counted from the first edge) of float32 `[N, ...]`."""
    lengths = torch.tensor(edges, device=tokens.device).diff()
    return torch.segment_reduce(tokens, pooling, lengths=lengths, axis=0, unsafe=True)
