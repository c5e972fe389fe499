"""Hybrid attention in C: the work of dense and sparse heads is one pool, cut into spans of equal size."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels._native.attention import Heads, attention
from saccade.types import Flags, KVView, Pooling, Selection, Softmax


def hybrid_decode(
    q: Tensor, kv: KVView, selection: Selection, dense: Flags, softmax: Softmax, pooling: Pooling | None, scored: Flags
) -> tuple[Tensor, Tensor | None]:
    heads = Heads.of(dense, scored)
    return attention("hybrid_decode", q, kv, softmax, pooling=pooling, selection=selection, heads=heads)
