"""A benchmark's own oracle: attention in float64 over what was chosen, before anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..decode.state import AttentionOperations, DecodeState
from ..errors import SaccadeError
from ..types import KVView, Selection


class Check:
    """Compares the first call of each attention operation of a step with float64 arithmetic on row 0.

    Args:
        label: whose, for the message.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self.calls = 0

    def on(self, state: DecodeState) -> None:
        """Check the operations of a state until `off`."""
        self._state, self._operations = state, state.attention
        state.attention = AttentionOperations(
            dense=self._checked(state.attention.dense, _no_selection),
            sparse=self._checked(state.attention.sparse, _given),
            hybrid=self._checked(state.attention.hybrid, _given),
        )

    def off(self) -> None:
        self._state.attention = self._operations

    def _checked(
        self, operation: Callable[..., Any], selection_of: Callable[..., Selection | None]
    ) -> Callable[..., Any]:
        seen = False

        def checked(q: Tensor, kv: KVView, *args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            result = operation(q, kv, *args, **kwargs)
            if not seen:
                seen = True
                self.calls += 1
                output = result[0] if isinstance(result, tuple) else result
                dense = args[1] if len(args) > 1 else None
                compare_attention(self._label, output, q, kv, selection_of(*args), dense, kwargs["scale"])
            return result

        return checked


def compare_attention(
    label: str,
    output: Tensor,
    q: Tensor,
    kv: KVView,
    selection: Selection | None,
    dense: tuple[bool, ...] | None,
    scale: float,
) -> None:
    """Compare row 0 of an attention output with float64.

    Args:
        label: whose, for the message.
        output: `[B, Hq, d]`.
        q, kv, selection, scale: what it was made of; no selection: all tokens.
        dense: KV heads that attend to all tokens although there is a selection.

    Raises:
        SaccadeError: if they differ by more than the dtype's rounding.
    """
    group = q.shape[1] // kv.kv_heads
    for query in range(q.shape[1]):
        head = query // group
        everything = selection is None or (dense is not None and dense[head])
        tokens = None if everything else _tokens(selection, query, kv.kv_heads, q.shape[1], kv)
        keys, values = _read(kv, head, tokens)
        weights = torch.softmax(keys @ q[0, query].double() * scale, dim=0)
        wanted, size = weights @ values, weights @ values.abs()
        # A weight may be rounded once and the result once, in the cache's dtype; logits err by float32 sums.
        unit = torch.finfo(q.dtype).eps / 2
        logit = float((keys.abs() @ q[0, query].double().abs()).max()) * scale * q.shape[2] * 2.0**-24
        budget = (2 * logit + 3 * unit + len(keys) * 2.0**-24) * size + unit * wanted.abs()
        error = (output[0, query].double() - wanted).abs()
        if not bool((error <= budget).all()):
            raise SaccadeError(
                f"{label}: query head {query}'s attention differs from float64 by {float(error.max()):.2e} "
                f"(budget {float(budget.min()):.2e}); a wrong result is not timed"
            )


def _no_selection(*_: Any) -> None:
    """A dense operation is given none."""


def _given(selection: Selection, *_: Any) -> Selection:
    """The first argument behind the cache."""
    return selection


def _tokens(selection: Selection | None, query: int, kv_heads: int, query_heads: int, kv: KVView) -> Tensor:
    """Positions that a query head of row 0 attends to.

    Raises:
        SaccadeError: if they are no ascending positions of the row.
    """
    assert selection is not None
    each = {1: 0, kv_heads: query * kv_heads // query_heads, query_heads: query}[selection.groups]
    count = int(selection.counts[0, each])
    units = selection.ids[0, each, :count].long()
    tokens = (units[:, None] * selection.unit + torch.arange(selection.unit, device=units.device)).flatten()
    tokens = tokens[tokens < int(kv.rows.seq_lens[0])]
    if count < 1 or bool((units.diff() <= 0).any()) or int(units[0]) < 0:
        raise SaccadeError(f"a set of {count} units is not ascending; a wrong result is not timed")
    return tokens


def _read(kv: KVView, head: int, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values `[n, d]` of row 0 in float64."""
    rows = kv.rows
    if tokens is None:
        tokens = torch.arange(int(rows.seq_lens[0]), device=kv.k.device)
    slots = tokens + int(rows.row_start[0])
    pages = rows.page_table[0].long()[slots // kv.page]
    return kv.k[pages, slots % kv.page, head].double(), kv.v[pages, slots % kv.page, head].double()
