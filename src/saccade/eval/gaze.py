"""Where a policy looks: which parts of the document the attended sets touch, beside attention recall."""

import torch

from ..decode.recall import membership
from .sheet import AnswerObserver, AnswerStep, Sheet

BINS = 160
"""Parts of equal length that a document is cut into."""


class GazeObserver(AnswerObserver):
    """Of each row, means over steps, sparse layers and heads: which bins of the document a set touches, and the fact.

    Rows whose `span` is unknown are not looked at, nor what is decoded behind the document.
    """

    def turn_to(self, sheet: Sheet) -> None:
        super().turn_to(sheet)
        self._edges = torch.arange(sheet.past, device="cpu") * BINS // sheet.past
        self._bins = torch.zeros(len(sheet.rows), BINS, device="cpu")
        self._held, self._sets = [0.0] * len(sheet.rows), [0] * len(sheet.rows)

    def see(self, step: AnswerStep) -> None:
        if step.selection is None:
            return
        heads, rows = step.span.stop - step.span.start, step.kv.rows
        held = membership(step.selection, rows.seq_lens, rows.max_len)[..., : self.sheet.past]
        for number, (row, answers) in enumerate(zip(self.sheet.rows, step.rows, strict=True)):
            if answers and row.span is not None:
                chosen = held[number].cpu()
                none = torch.zeros(chosen.shape[0], BINS, dtype=torch.int64, device="cpu")
                self._bins[number] += (none.index_add_(1, self._edges, chosen.long()) > 0).float().mean(0) * heads
                self._held[number] += float(chosen[:, slice(*row.span)].any(-1).float().mean()) * heads
                self._sets[number] += heads

    def bins(self, row: int) -> list[float] | None:
        """Share 0..1 of sets that hold a token of each bin; None if every layer attended to everything."""
        sets = self._sets[row]
        return [round(share, 3) for share in (self._bins[row] / sets).tolist()] if sets else None

    def fact_held(self, row: int) -> float | None:
        """Share 0..1 of sets that hold a token of the fact's value; None if every layer attended to everything."""
        return self._held[row] / self._sets[row] if self._sets[row] else None
