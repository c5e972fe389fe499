"""A benchmark's own oracle: attention in float64 over what was chosen, before anything is timed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..decode.state import DecodeState
from ..errors import SaccadeError
from ..types import KVView, Selection, Softmax
from .clock import wrapped


@contextmanager
def checked(state: DecodeState, label: str) -> Iterator[None]:
    """Compare the first call of each attention operation of a state with float64 arithmetic on row 0.

    Raises:
        SaccadeError: if they differ by more than the dtype's rounding, or nothing was computed; `label` says whose.
    """
    calls = 0

    def around(operation: Callable[..., Any]) -> Callable[..., Any]:
        seen = False

        def compared(q: Tensor, kv: KVView, *given: Any, **rest: Any) -> Any:
            nonlocal calls, seen
            result = operation(q, kv, *given, **rest)
            if not seen:
                seen = True
                calls += 1
                output = result[0] if isinstance(result, tuple) else result
                # A dense operation is given neither a selection nor which heads are dense.
                *sets, softmax = given
                selection, dense = (*sets, None, None)[:2]
                compare_attention(label, output, q, kv, selection, dense, softmax)
            return result

        return compared

    operations = state.attention
    state.attention = wrapped(operations, around)
    yield
    state.attention = operations
    if calls == 0:
        raise SaccadeError(f"{label}: no attention was computed; nothing to time")


def compare_attention(
    label: str, output: Tensor, q: Tensor, kv: KVView, selection: Selection | None, dense: tuple[bool, ...] | None,
    softmax: Softmax,
) -> None:  # fmt: skip
    """Compare row 0 of an attention output with float64.

    Args:
        label: whose, for the message.
        output: `[B, Hq, d]`.
        q, kv, selection, softmax: what it was made of; no selection: all tokens.
        dense: KV heads that attend to all tokens although there is a selection.

    Raises:
        SaccadeError: if they differ by more than the dtype's rounding.
    """
    group = q.shape[1] // kv.kv_heads
    for query in range(q.shape[1]):
        head = query // group
        if selection is None or (dense is not None and dense[head]):
            tokens = torch.arange(int(kv.rows.seq_lens[0]), device=kv.k.device)
        else:
            tokens = _tokens(selection, query, q.shape[1], kv)
        keys, values = _read(kv, head, tokens)
        logits = keys @ q[0, query].double() * softmax.scale
        if softmax.cap is not None:
            logits = softmax.cap * torch.tanh(logits / softmax.cap)
        sink = logits[:0] if softmax.sinks is None else softmax.sinks[query : query + 1].double()
        weights = torch.softmax(torch.cat([logits, sink]), dim=0)[: len(logits)]
        wanted, size = weights @ values, weights @ values.abs()
        # A weight may be rounded once and the result once, in the cache's dtype; logits err by float32 sums.
        unit = torch.finfo(q.dtype).eps / 2
        logit = float((keys.abs() @ q[0, query].double().abs()).max()) * softmax.scale * q.shape[2] * 2.0**-24
        budget = (2 * logit + 3 * unit + len(keys) * 2.0**-24) * size + unit * wanted.abs()
        error = (output[0, query].double() - wanted).abs()
        if not bool((error <= budget).all()):
            raise SaccadeError(
                f"{label}: query head {query}'s attention differs from float64 by {float(error.max()):.2e} "
                f"(budget {float(budget.min()):.2e}); a wrong result is not timed"
            )


def _tokens(selection: Selection, query: int, query_heads: int, kv: KVView) -> Tensor:
    """Positions that a query head of row 0 attends to, or a SaccadeError if they do not ascend within the row."""
    each = query * selection.groups // query_heads
    count = int(selection.counts[0, each])
    units = selection.ids[0, each, :count].long()
    tokens = (units[:, None] * selection.unit + torch.arange(selection.unit, device=units.device)).flatten()
    tokens = tokens[tokens < int(kv.rows.seq_lens[0])]
    if count < 1 or bool((units.diff() <= 0).any()) or int(units[0]) < 0:
        raise SaccadeError(f"a set of {count} units is not ascending; a wrong result is not timed")
    return tokens


def _read(kv: KVView, head: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[n, d]` of row 0 in float64."""
    slots = tokens + int(kv.rows.row_start[0])
    pages = kv.rows.page_table[0].long()[slots // kv.page]
    return kv.k[pages, slots % kv.page, head].double(), kv.v[pages, slots % kv.page, head].double()
