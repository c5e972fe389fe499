"""What is kept for a request between its steps where an index belongs to one sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....decode.state import DecodeState
from ....selection.history import ALL_CLEAN
from .requests import RequestRow


@dataclass(slots=True, eq=False)
class SequenceMemory:
    """One request's state: its index, its text, and how far its cache is clean.

    Attributes:
        state: of a batch of this request alone.
        every: sparse steps between dense passes; None: sparse steps are never made good.
        clean: slots below it hold keys and values that dense steps wrote.
        rewritten: first slot written since the index was last brought up to date.
    """

    state: DecodeState
    every: int | None
    clean: int = 0
    rewritten: int = 0
    _text: int = 0

    def written(self, start: int, stop: int, *, dense: bool) -> None:
        """Note a step that writes slots `start..stop`."""
        self.rewritten = min(self.rewritten, start)
        # The phase counts from the prompt whether or not a budget covers the row, as in the transformers adapter.
        due = self.every is not None and stop - 1 - self.clean >= self.every
        if dense or due:
            self.clean = stop

    def begin(self, request: RequestRow, length: int) -> None:
        """Prepare a sparse step of a row of `length` tokens."""
        history = self.state.history
        history.clean = ALL_CLEAN if self.every is None else self.clean
        if self.state.plan.selector is not None and self.state.plan.selector.reads_text and self._text < length:
            ids = torch.tensor([_tokens(request, self._text, length)], dtype=torch.int64)
            history.record(self._text, ids.shape[1], 1, ids, None)
            self._text = length
        self.state.begin(min(self.rewritten, length - 1))
        self.rewritten = length


def _tokens(request: RequestRow, start: int, stop: int) -> Sequence[int]:
    """Token ids `start..stop` of a request; -1 (unknown) where the prompt came as embeddings."""
    if request.prompt is None:
        return [-1] * (stop - start)
    length = len(request.prompt)
    output = request.output[max(start - length, 0) : max(stop - length, 0)]
    known = [*request.prompt[start:stop], *output]
    return known + [-1] * (stop - start - len(known))
