"""Queries that share a KV head, and pooling of runs of neighbouring rows of a matrix, without atomics."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

RunPooling = Literal["mean", "max"]

BLOCK = 4096
"""Tokens whose keys are copied at a time."""


def grouped(q: Tensor, kv_heads: int) -> Tensor:
    """Queries `[B, Hq, d]` by the KV head that they read, float32 `[B, Hkv, g, d]`."""
    batch, heads, head_dim = q.shape
    return q.float().reshape(batch, kv_heads, heads // kv_heads, head_dim)


def pool_runs(tokens: Tensor, lengths: Tensor, pooling: RunPooling) -> Tensor:
    """Mean or maximum of each run of `lengths[i]` neighbouring rows of float32 `[N, ...]`; 0 of no rows."""
    pooled = torch.segment_reduce(tokens, pooling, lengths=lengths, axis=0, unsafe=True)
    return pooled.masked_fill_((lengths == 0).view(-1, *[1] * (tokens.dim() - 1)), 0.0)
