"""In which steps recall is measured, and of which rows: evenly spread, without chance."""

from collections.abc import Callable

from ....decode.capture import KeptSteps
from ....decode.recall import OfRows
from ....decode.state import Observer
from ....types import KVView, Rows
from .batch import Batch
from .worker import Serving


class Sampling:
    """Measures recall in some steps: while a mixed step runs, or behind a captured one from what it has kept."""

    def __init__(self, serving: Serving, view: Callable[[int, Rows], KVView]) -> None:
        self._serving, self._view = serving, view
        self._measured = 0.0
        self.keeping: tuple[KeptSteps, ...] = ()
        """Who sees captured steps."""
        self._sampled: tuple[Rows, list[bool]] | None = None

    def keep(self, group: int, rows: int) -> None:
        """Where recall is measured, keep what captured steps of so many rows choose; `group` queries share a head."""
        if self._serving.recall is not None:
            self.keeping = (KeptSteps(self._serving.plan, group, rows),)

    def sample(self, batch: Batch, whole: list[bool], rows: Rows) -> None:
        """Note the captured step at hand, if it is to be measured: what is remembered of its rows is a copy."""
        if not self.keeping or not batch.announced:
            return
        of_rows, covers = zip(batch.queries, whole, batch.lengths, strict=True), self._serving.plan.covers
        decoding = [queries == 1 and not other and not covers(length) for queries, other, length in of_rows]
        if not any(decoding) or not self._due():
            return
        count, longest = sum(queries == 1 for queries in batch.queries), max(batch.lengths)
        table, starts, lengths = (held[:count].clone() for held in (rows.page_table, rows.row_start, rows.seq_lens))
        self._sampled = Rows(table, starts, lengths, longest), decoding[:count]

    def measure_kept(self) -> None:
        """Measure recall in the captured step before this one, if it was sampled."""
        recall, sampled = self._serving.recall, self._sampled
        if recall is None or sampled is None:
            return
        self._sampled = None
        for kept in self.keeping:
            kept.measure(recall, sampled[0], self._view, sampled[1])
        if self._serving.metrics is not None:
            self._serving.metrics.measured(sum(sampled[1]))

    def observers(self, lengths: list[int]) -> tuple[Observer, ...]:
        """Who sees the mixed step at hand, in rows of these lengths: those that the budget does not cover."""
        recall, counted = self._serving.recall, [not self._serving.plan.covers(length) for length in lengths]
        if recall is None or not any(counted) or not self._due():
            return ()
        if self._serving.metrics is not None:
            self._serving.metrics.measuring(sum(counted))
        return (OfRows(recall, counted, max(lengths)),)

    def _due(self) -> bool:
        self._measured += self._serving.options.recall
        if self._measured < 1:
            return False
        self._measured -= 1
        return True
