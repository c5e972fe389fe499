"""The rolling selection: the latest set of every head index, whoever chose it."""

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

    def publish(self, span: HeadSpan, kv_heads: int, selection: Selection, rows: Rows) -> None:
        """Make `selection` the latest set of the span's heads."""
        if span.stop - span.start < kv_heads:
            old = self._selection if self._rows is rows else None
            selection = _merged(old, span, kv_heads, selection)
        self._rows, self._selection = rows, selection

    def latest(self, rows: Rows) -> Selection:
        """The latest sets of all heads; a head that nobody has refreshed in this step holds an empty one.

        `rows` are those of the refresh: all layers of a step share them.
        """
        assert self._selection is not None and self._rows is rows, (
            "the role map guarantees a refresher below every reader"
        )
        return self._selection


def _merged(old: Selection | None, span: HeadSpan, kv_heads: int, selection: Selection) -> Selection:
    """`old` with the sets of the span's heads replaced; heads that nobody has refreshed yet hold an empty set."""
    per_head = selection.groups // (span.stop - span.start)
    batch, _, width = selection.ids.shape
    if old is None:
        ids = selection.ids.new_full((batch, kv_heads * per_head, width), -1)
        counts = selection.counts.new_zeros(ids.shape[:2])
        overflowed = None if selection.overflowed is None else selection.overflowed.new_zeros(ids.shape[:2])
    else:
        width = max(width, old.ids.shape[-1])
        ids, counts = _pad(old.ids, width).clone(), old.counts.clone()
        overflowed = None if old.overflowed is None else old.overflowed.clone()
    heads = slice(span.start * per_head, span.stop * per_head)
    ids[:, heads], counts[:, heads] = _pad(selection.ids, width), selection.counts
    if overflowed is not None and selection.overflowed is not None:
        overflowed[:, heads] = selection.overflowed
    return Selection(ids, counts, selection.unit, overflowed)


def _pad(ids: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(ids, (0, width - ids.shape[-1]), value=-1)
