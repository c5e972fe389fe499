"""Dense decoding attention in Triton: one pass over keys and values, which keeps the scores on the way."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels._triton.attention import attend
from saccade.kernels._triton.scoring import score
from saccade.types import KVView, Pooling, Softmax


def decode_scores(q: Tensor, kv: KVView, pooling: Pooling) -> Tensor:
    return score(q, kv, pooling)


def dense_decode_scores(
    q: Tensor, kv: KVView, softmax: Softmax, pooling: Pooling | None, out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    return attend(q, kv, softmax, out=out, pooling=pooling)
