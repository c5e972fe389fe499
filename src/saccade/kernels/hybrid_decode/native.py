"""Hybrid attention in C: the work of dense and sparse heads is one pool, cut into spans of equal size."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._native.attention import Heads, attention
from saccade.types import Flags, KVView, Pooling, Selection, Softmax


def hybrid_decode(
    q: Tensor, kv: KVView, selection: Selection, dense: Flags, softmax: Softmax, pooling: Pooling | None, scored: Flags
) -> tuple[Tensor, Tensor | None]:
    scores: Tensor | None = None
    if pooling is not None:
        groups = sum(scored) * (q.shape[1] // kv.kv_heads if pooling == "each" else 1)
        scores = torch.empty((q.shape[0], groups, kv.rows.max_len), dtype=torch.float32, device="cpu")
    heads = Heads.of(dense, scored)
    out = attention("hybrid_decode", q, kv, softmax, scores=scores, pooling=pooling, selection=selection, heads=heads)
    return out, scores
