"""`attend`: what one layer does for one new token. The main path of every policy, in every adapter."""

import torch
from torch import Tensor

from ..plans.roles import HeadSpan
from ..types import KVView, Role, Softmax
from .state import DecodeState


def attend(
    state: DecodeState,
    layer: int,
    q: Tensor,
    kv: KVView,
    softmax: Softmax,
    *,
    position: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention output of the current token of every row, under the state's plan.

    Args:
        state: plan and mutable state of this batch; layers must come in ascending order within a step.
        layer: decoder layer, from 0.
        q: queries `[B, Hq, d]` of each row's last token, RoPE applied.
        kv: the layer's cache, the current token included.
        softmax: what the layer makes of scores q·k.
        position: which one of a call's new tokens this is, when several come at once.
        out: where the output goes, contiguous, as q; None: memory of its own.

    Returns:
        `[B, Hq, d]` in q's dtype.
    """
    roles = state.plan.roles
    spans = roles.spans[layer]
    sparse = state.needs_selection(kv.rows.max_len)
    if not sparse:
        output, _ = state.attention.dense(q, kv, softmax, out=out)
    else:
        for span in spans:
            if span.role is Role.SELECT:
                _refresh(state, layer, span, q, kv, None, softmax.scale, position)
        output, scores = _attention(state, layer, q, kv, softmax, position, out)
        for span in spans:
            if span.role is Role.PUBLISH:
                _refresh(state, layer, span, q, kv, scores, softmax.scale, position)
    state.account(layer, q, kv, softmax, position, sparse)
    return output


def _attention(
    state: DecodeState, layer: int, q: Tensor, kv: KVView, softmax: Softmax, position: int, out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Every head attends to all tokens or to its set, in one operation; and the scores of the heads that publish."""
    roles, selector = state.plan.roles, state.plan.selector
    dense, publishing = roles.attending_to_all[layer], roles.publishing[layer]
    pooling = selector.fused_pooling if selector is not None and any(publishing) else None
    if all(dense):
        output, scores = state.attention.dense(q, kv, softmax, pooling=pooling, out=out)
        if scores is not None and not all(publishing):
            per_head = scores.shape[1] // len(publishing)
            scores = torch.cat(
                [part for part, kept in zip(scores.split(per_head, 1), publishing, strict=True) if kept], 1
            )
        return output, scores
    selection = state.rolling(position).latest(kv.rows)
    if not any(dense):
        return state.attention.sparse(q, kv, selection, softmax, out=out, workspace=state.workspace), None
    scored = publishing if pooling is not None else None
    return state.attention.hybrid(q, kv, selection, dense, softmax, pooling=pooling, scored=scored, out=out)


def _refresh(
    state: DecodeState,
    layer: int,
    span: HeadSpan,
    q: Tensor,
    kv: KVView,
    scores: Tensor | None,
    scale: float,
    position: int,
) -> None:
    """Let neighbouring heads choose a new set: from the scores that dense attention has stored, or from their index."""
    selector = state.plan.selector
    assert selector is not None, "only a plan with a selector has roles that refresh"
    group = q.shape[1] // kv.kv_heads
    heads = kv.heads(span.start, span.stop)
    index = state.indexes.of(layer, kv)
    narrowed = None if index is None else index.heads(span.start, span.stop)
    publishing = state.plan.roles.publishing[layer]
    if scores is not None and sum(publishing) > span.stop - span.start:
        first, per_head = sum(publishing[: span.start]), scores.shape[1] // sum(publishing)
        scores = scores[:, first * per_head : (first + span.stop - span.start) * per_head]
    queries = q if heads is kv else q[:, span.start * group : span.stop * group]
    chosen = selector.select(queries, heads, narrowed, scores, scale)
    state.rolling(position).publish(span, kv.kv_heads, chosen, kv.rows)
