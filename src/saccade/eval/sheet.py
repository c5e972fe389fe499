"""Questions as rows of one batch: what each feeds, and who looks at the answer of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..decode.counters import Counters, Usage
from ..decode.recall import Recall, RecallObserver
from ..decode.stats import RunStats
from ..plans.roles import HeadSpan
from ..types import KVView, ModelShape, Rows, Selection, Softmax


@dataclass(slots=True, eq=False)
class Row:
    """A question and what is known of its answer.

    Attributes:
        tokens: the question, then its answer; the answer's last one is never fed.
        asked: how many of them are the question's.
        span: first token of the text that holds the answer, and the one behind the last; None if unknown.
        end: tokens that are fed for it, behind which the row is filled up; None: its answer goes on.
    """

    tokens: list[int]
    asked: int
    span: tuple[int, int] | None
    end: int | None = None

    @property
    def said(self) -> list[int]:
        return self.tokens[self.asked :]


@dataclass(frozen=True, slots=True)
class Sheet:
    """Some questions as one batch. All rows are fed as many tokens; one that has no more repeats its last.

    Attributes:
        past: tokens of the text before them.
    """

    rows: tuple[Row, ...]
    past: int

    @classmethod
    def of(cls, rows: Sequence[Row], wanted: int, past: int) -> Sheet:
        """A batch of so many rows: a smaller last one is filled up, because the cache has that many."""
        filling = (Row(rows[-1].tokens, rows[-1].asked, None, end=0) for _ in range(wanted - len(rows)))
        return cls((*rows, *filling), past)

    @property
    def first(self) -> int:
        """The first position behind which an answer's token is expected."""
        return min(row.asked for row in self.rows) - 1

    def right(self, logits: Tensor) -> list[bool]:
        """Which rows' answers are the most likely ones, by the logits `[R, n, V]` from `first` on."""
        said = zip(self.rows, logits.argmax(-1).tolist(), strict=True)
        behind = ((row.said, tokens[row.asked - 1 - self.first :]) for row, tokens in said)
        return [tokens[: len(answer)] == answer for answer, tokens in behind]

    def fed(self, begin: int, count: int) -> list[list[int]]:
        """`count` tokens of each row, `[R][count]`, from its token number `begin` on."""
        parts = ((row.tokens[begin : begin + count], row.tokens[-1:]) for row in self.rows)
        return [part + last * (count - len(part)) for part, last in parts]

    def answering(self, position: int) -> list[bool]:
        """Which rows' token at `position`, counted from the question's first one, is followed by one of the answer."""
        return [row.asked - 1 <= position and (row.end is None or position < row.end) for row in self.rows]


@dataclass(frozen=True, slots=True)
class AnswerStep:
    """What `AnswerObserver.see` is given: a token at `position`, and which `rows` are to be looked at."""

    layer: int
    span: HeadSpan
    q: Tensor
    kv: KVView
    selection: Selection | None
    softmax: Softmax
    position: int
    rows: list[bool]


class AnswerObserver(ABC):
    """Base of observers that look at answers only: `see` gets the queries whose next token is one of the answer."""

    sheet = Sheet((), 0)

    def turn_to(self, sheet: Sheet) -> None:
        """Called before every batch with the questions that will be decoded; before the first, nothing is seen."""
        self.sheet = sheet

    def observe(
        self, layer: int, span: HeadSpan, q: Tensor, kv: KVView, selection: Selection | None, softmax: Softmax
    ) -> None:
        position = kv.rows.max_len - 1 - self.sheet.past
        rows = self.looked_at(position)
        if any(rows):
            self.see(AnswerStep(layer, span, q, kv, selection, softmax, position, rows))

    def looked_at(self, position: int) -> list[bool]:
        """Which rows: those that answer, unless a subclass says otherwise."""
        return self.sheet.answering(position)

    @abstractmethod
    def see(self, step: AnswerStep) -> None:
        """Called for every layer and span of heads of such a token."""


class AnswerRecall(AnswerObserver):
    """Both recalls of each layer, and of every answer token."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.recall, self._first = RecallObserver(layers, keep_steps=True), layers[0]
        self._owners: list[Row] = []

    def see(self, step: AnswerStep) -> None:
        if (step.layer, step.span.start) == (self._first, 0):
            self._owners += [row for row, answers in zip(self.sheet.rows, step.rows, strict=True) if answers]
        self.recall.observe(step.layer, step.span, step.q, step.kv, step.selection, step.softmax, rows=step.rows)

    def records(self, row: Row) -> Recall:
        """What was measured of one row's answer, as `RecallObserver.records`."""
        own = torch.tensor([owner is row for owner in self._owners], dtype=torch.bool, device="cpu")
        attention, token = (part[own] for part in self.recall.records())
        return Recall(attention, token)


class RowCounter(AnswerObserver):
    """Counts what questions asked one at a time would: every row is a step, until its answer has ended."""

    def __init__(self, shape: ModelShape) -> None:
        self._counters = Counters(shape.layers, by_row=True)
        self._kv_heads, self._last = shape.kv_heads, shape.full_layers[-1]
        self._passes = self._noted = 0
        self._usages: list[Usage] = []
        self._held: dict[int, tuple[Rows, Rows]] = {}

    def looked_at(self, position: int) -> list[bool]:
        return [row.end is None for row in self.sheet.rows]

    def see(self, step: AnswerStep) -> None:
        rows, chosen = step.kv.rows, step.selection
        # One object for all layers of a step; what is `whole` is not counted.
        if id(rows) not in self._held:
            counted = torch.tensor(step.rows, device="cpu").to(rows.seq_lens.device)
            self._held[id(rows)] = rows, replace(rows, whole=~counted)
        sets = () if chosen is None else (chosen.counts, chosen.unit, chosen.overflowed)
        self._usages.append(Usage(step.layer, step.kv.kv_heads / self._kv_heads, self._held[id(rows)][1], *sets))
        if step.layer == self._last and step.span.stop == self._kv_heads:
            self._counters.add(self._usages)
            self._usages.clear()
            self._held.clear()

    def stats(self, stats: RunStats) -> RunStats:
        """A run's statistics with these counts in the place of its own; to be asked before a row ends, and last."""
        new, self._noted = stats.dense_passes - self._noted, stats.dense_passes
        self._passes += new * sum(self.looked_at(0))
        return replace(stats, layers=RunStats.of("", self._counters, None).layers, dense_passes=self._passes)
