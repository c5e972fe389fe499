"""Dense decoding attention in C: one pass over keys and values, which keeps the scores on the way."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels._native.attention import attention
from saccade.types import KVView, Pooling, Softmax


def decode_scores(q: Tensor, kv: KVView, pooling: Pooling) -> Tensor:
    _, scores = attention("decode_scores", q, kv, Softmax(1.0), pooling=pooling, attends=False)
    assert scores is not None
    return scores


def dense_decode_scores(
    q: Tensor, kv: KVView, softmax: Softmax, pooling: Pooling | None
) -> tuple[Tensor, Tensor | None]:
    return attention("dense_decode_scores", q, kv, softmax, pooling=pooling)
