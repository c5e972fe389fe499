"""What is kept for a request between its steps where an index belongs to one sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....decode.state import AttentionOperations, DecodeState
from ....plans.rectify import Phase
from ....selection.history import TokenHistory
from .requests import RequestRow
from .worker import Serving


@dataclass(slots=True, eq=False)
class SequenceMemory:
    """One request's state: its index, its text, and, in `state.history`, how far its cache is clean.

    Attributes:
        state: of a batch of this request alone.
        phase: when a step is dense.
        rewritten: first slot written since the index was last brought up to date.
    """

    state: DecodeState
    phase: Phase
    rewritten: int = 0
    _text: int = 0

    @classmethod
    def of(cls, serving: Serving, attention: AttentionOperations) -> SequenceMemory:
        """That of a new request."""
        history, phase = TokenHistory(serving.levels), serving.options.policy.phase
        if phase.every is not None:
            history.clean = 0
        given = (serving.plan, serving.counters)
        return cls(DecodeState(*given, exhaustive_is_dense=False, history=history, attention=attention), phase)

    def written(self, start: int, stop: int, *, dense: bool) -> None:
        """Note a step that writes slots `start..stop`."""
        self.rewritten = min(self.rewritten, start)
        history = self.state.history
        # The phase counts from the prompt whether or not a budget covers the row, as in the transformers adapter.
        if self.phase.every is not None and (dense or self.phase.due(start - history.clean, stop - start)):
            history.clean = stop

    def begin(self, request: RequestRow, length: int) -> None:
        """Prepare a sparse step of a row of `length` tokens."""
        selector = self.state.plan.selector
        if selector is not None and selector.reads_text and self._text < length:
            ids = torch.tensor([_tokens(request, self._text, length)], dtype=torch.int64)
            self.state.history.record(self._text, ids.shape[1], 1, ids, None)
            self._text = length
        self.state.begin(min(self.rewritten, length - 1))
        self.rewritten = length


def _tokens(request: RequestRow, start: int, stop: int) -> Sequence[int]:
    """Token ids `start..stop` of a request; -1 (unknown) where the prompt came as embeddings."""
    if request.prompt is None:
        return [-1] * (stop - start)
    first, last = (max(place - len(request.prompt), 0) for place in (start, stop))
    known = [*request.prompt[start:stop], *request.output[first:last]]
    return known + [-1] * (stop - start - len(known))
