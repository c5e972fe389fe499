"""Dense decoding attention in C: one pass over keys and values, which keeps the scores on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._native.attention import attention
from saccade.types import KVView, Pooling, Softmax


def decode_scores(q: Tensor, kv: KVView, pooling: Pooling) -> Tensor:
    scores = _scores(q, kv, pooling)
    attention("decode_scores", q, kv, Softmax(1.0), scores=scores, pooling=pooling, attends=False)
    return scores


def dense_decode_scores(
    q: Tensor, kv: KVView, softmax: Softmax, pooling: Pooling | None
) -> tuple[Tensor, Tensor | None]:
    scores = None if pooling is None else _scores(q, kv, pooling)
    return attention("dense_decode_scores", q, kv, softmax, scores=scores, pooling=pooling), scores


def _scores(q: Tensor, kv: KVView, pooling: Pooling) -> Tensor:
    groups = q.shape[1] if pooling == "each" else kv.kv_heads
    return torch.empty((q.shape[0], groups, kv.rows.max_len), dtype=torch.float32, device="cpu")
