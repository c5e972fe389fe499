"""The rolling selection: the latest set of every head index, whoever chose it."""

from __future__ import annotations

import torch
from torch import Tensor

from .roles import HeadSpan
from .types import Rows, Selection


class RollingSelection:
    """Whoever refreshes overwrites the rows of its heads; whoever attends to a set reads the latest."""

    def __init__(self) -> None:
        self._selection: Selection | None = None
        self._usage: Tensor | None = None

    def publish(self, span: HeadSpan, kv_heads: int, selection: Selection, rows: Rows) -> None:
        """Make `selection` the latest set of the span's heads."""
        usage = _usage(selection, rows)
        if span.stop - span.start == kv_heads or self._selection is None:
            self._selection, self._usage = _widen(span, kv_heads, selection, usage)
            return
        assert self._usage is not None
        old = self._selection
        width = max(old.ids.shape[-1], selection.ids.shape[-1])
        per_head = old.groups // kv_heads
        heads = slice(span.start * per_head, span.stop * per_head)
        ids, counts, all_usage = _pad(old.ids, width), old.counts.clone(), self._usage.clone()
        ids[:, heads], counts[:, heads], all_usage[:, heads] = _pad(selection.ids, width), selection.counts, usage
        self._selection, self._usage = Selection(ids, counts, selection.unit), all_usage

    def read(self, span: HeadSpan, kv_heads: int) -> Selection:
        """The latest sets of the span's heads."""
        assert self._selection is not None, "the role map guarantees a refresher below every reader"
        return self._selection.heads(span.start, span.stop, kv_heads)

    def usage(self, span: HeadSpan, kv_heads: int) -> Tensor:
        """Mean tokens attended and mean share of the row, float32 `[2]`, over the span's heads and the batch."""
        assert self._usage is not None, "the role map guarantees a refresher below every reader"
        if self._usage.shape[1] == 1:
            return self._usage[:, 0]
        per_head = self._usage.shape[1] // kv_heads
        return self._usage[:, span.start * per_head : span.stop * per_head].mean(1)


def _usage(selection: Selection, rows: Rows) -> Tensor:
    tokens = selection.tokens(rows.seq_lens).float()
    return torch.stack((tokens.mean(0), (tokens / rows.seq_lens[:, None]).mean(0)))


def _widen(span: HeadSpan, kv_heads: int, selection: Selection, usage: Tensor) -> tuple[Selection, Tensor]:
    """Sets for all heads of a layer, empty where the span does not reach."""
    if selection.groups == 1 or span.stop - span.start == kv_heads:
        return selection, usage
    per_head = selection.groups // (span.stop - span.start)
    before, after = span.start * per_head, (kv_heads - span.stop) * per_head
    pad = torch.nn.functional.pad
    ids = pad(selection.ids, (0, 0, before, after), value=-1)
    counts = pad(selection.counts, (before, after))
    return Selection(ids, counts, selection.unit), pad(usage, (before, after))


def _pad(ids: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(ids, (0, width - ids.shape[-1]), value=-1)
