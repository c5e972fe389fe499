"""`attend`: what one layer does for one new token. The main path of every policy, in every adapter."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels.dense_decode_scores.api import dense_decode_scores
from .kernels.sparse_decode.api import sparse_decode
from .roles import HeadSpan
from .state import DecodeState
from .types import KVView


def attend(state: DecodeState, layer: int, q: Tensor, kv: KVView, *, scale: float, position: int = 0) -> Tensor:
    """Attention output of the current token of every row, under the state's plan.

    Args:
        state: plan and mutable state of this batch; layers must come in ascending order within a step.
        layer: decoder layer, from 0.
        q: queries `[B, Hq, d]` of each row's last token, RoPE applied.
        kv: the layer's cache, the current token included.
        scale: factor on q·k before the softmax.
        position: which one of a call's new tokens this is, when several come at once.

    Returns:
        `[B, Hq, d]` in q's dtype.
    """
    spans = state.plan.roles.spans[layer]
    if len(spans) == 1:
        return _attend_span(state, layer, spans[0], q, kv, scale, position)
    group = q.shape[1] // kv.kv_heads
    outputs = [
        _attend_span(state, layer, span, q[:, span.start * group : span.stop * group], kv, scale, position)
        for span in spans
    ]
    return torch.cat(outputs, dim=1)


def _attend_span(
    state: DecodeState, layer: int, span: HeadSpan, q: Tensor, kv: KVView, scale: float, position: int
) -> Tensor:
    """Attention of neighbouring heads with one role: attend to all or to the set, refresh it or not."""
    selector, role, kv_heads = state.plan.selector, span.role, kv.kv_heads
    heads = kv.heads(span.start, span.stop)
    if selector is None or not state.needs_selection(kv.rows.max_len):
        dense, _ = dense_decode_scores(q, heads, scale=scale, pooling=None)
        state.account(layer, span, kv_heads, None, q, heads, scale, position)
        return dense

    scores: Tensor | None = None
    output: Tensor | None = None
    if role.attends_to_all:
        pooling = selector.fused_pooling if role.refreshes else None
        output, scores = dense_decode_scores(q, heads, scale=scale, pooling=pooling)
    if role.refreshes:
        index = state.index(layer, kv)
        narrowed = None if index is None else index.heads(span.start, span.stop)
        state.rolling(position).publish(span, kv_heads, selector.select(q, heads, narrowed, scores), kv.rows)
    selection = None if role.attends_to_all else state.rolling(position).read(span, kv_heads, kv.rows)
    if selection is not None:
        output = sparse_decode(q, heads, selection, scale=scale)
    state.account(layer, span, kv_heads, selection, q, heads, scale, position)
    assert output is not None
    return output
