"""The rolling selection: the latest set of every head index, whoever chose it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..plans.roles import HeadSpan
from ..types import Rows, Selection


class RollingSelection:
    """Whoever refreshes overwrites the rows of its heads; whoever attends to a set reads the latest.

    It holds one step: the first refresh for other rows than those it knows starts afresh.
    """

    def __init__(self) -> None:
        self._rows: Rows | None = None
        self._selection: Selection | None = None
        self._usage: Tensor | None = None
        self._means: dict[tuple[int, int], Tensor] = {}

    def publish(self, span: HeadSpan, kv_heads: int, selection: Selection, rows: Rows) -> None:
        """Make `selection` the latest set of the span's heads."""
        usage = _usage(selection, rows)
        if span.stop - span.start < kv_heads:
            old, old_usage = (self._selection, self._usage) if self._rows is rows else (None, None)
            selection, usage = _merged(old, old_usage, span, kv_heads, selection, usage)
        self._rows, self._selection, self._usage = rows, selection, usage
        self._means.clear()

    def read(self, span: HeadSpan, kv_heads: int, rows: Rows) -> Selection:
        """The latest sets of the span's heads; `rows` are those of the refresh: all layers of a step share them."""
        return self.latest(rows).heads(span.start, span.stop, kv_heads)

    def latest(self, rows: Rows) -> Selection:
        """The latest sets of all heads; a head that nobody has refreshed in this step holds an empty one."""
        assert self._selection is not None and self._rows is rows, (
            "the role map guarantees a refresher below every reader"
        )
        return self._selection

    def usage(self, span: HeadSpan, kv_heads: int) -> Tensor:
        """Means over the span's heads and the batch, float32 `[3]`: tokens attended, share of the row, overflow."""
        assert self._usage is not None, "the role map guarantees a refresher below every reader"
        if self._usage.shape[1] == 1:
            return self._usage[:, 0]
        heads = span.start, span.stop
        if heads not in self._means:
            per_head = self._usage.shape[1] // kv_heads
            self._means[heads] = self._usage[:, span.start * per_head : span.stop * per_head].mean(1)
        return self._means[heads]


def _usage(selection: Selection, rows: Rows) -> Tensor:
    """Per set, means over the batch, float32 `[3, G]`."""
    tokens = selection.tokens(rows.seq_lens).float()
    overflow = torch.zeros_like(tokens) if selection.overflowed is None else selection.overflowed.float()
    return torch.stack((tokens, tokens / rows.seq_lens[:, None], overflow)).mean(1)


def _merged(
    old: Selection | None, old_usage: Tensor | None, span: HeadSpan, kv_heads: int, selection: Selection, usage: Tensor
) -> tuple[Selection, Tensor]:
    """`old` with the sets of the span's heads replaced; heads that nobody has refreshed yet hold an empty set."""
    per_head = selection.groups // (span.stop - span.start)
    batch, _, width = selection.ids.shape
    if old is None or old_usage is None:
        ids = selection.ids.new_full((batch, kv_heads * per_head, width), -1)
        counts = selection.counts.new_zeros(ids.shape[:2])
        all_usage = usage.new_zeros((3, ids.shape[1]))
    else:
        width = max(width, old.ids.shape[-1])
        ids, counts, all_usage = _pad(old.ids, width).clone(), old.counts.clone(), old_usage.clone()
    heads = slice(span.start * per_head, span.stop * per_head)
    ids[:, heads], counts[:, heads], all_usage[:, heads] = _pad(selection.ids, width), selection.counts, usage
    return Selection(ids, counts, selection.unit), all_usage


def _pad(ids: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(ids, (0, width - ids.shape[-1]), value=-1)
