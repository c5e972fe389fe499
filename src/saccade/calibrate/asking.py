"""Asking: a text is prefilled once, densely; its questions are then decoded as rows of one batch, under any policy.

Answers are fed, not sampled. A question is right if every token of its answer is the most likely one behind those
before it, which is when greedy decoding would say it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..adapters.hf.run import sparsify
from ..checkpoints.shape import shape_of
from ..decode.recall import MeanRecall, RecallObserver
from ..eval.reader import Reader
from ..methods.policy import Policy
from ..plans.roles import HeadSpan
from ..recipes.machine import free_memory
from ..types import KVView, Selection, Softmax
from .problems import Ask, Problem

UNTOLD, PLANNED, ROW, WIDEST = 4 * 2**30, 7 / 8, 1.5, 6
"""Free bytes if nobody says; the share planned with; caches that one with room and index takes; tensors of a layer."""


def rows_that_fit(model: Any, tokens: int, asked: int, processes: int = 1) -> int:
    """Rows of batches for `asked` questions: as few and as even as free memory, which `processes` share, allows.

    Each row has its own cache with a text of so many tokens; beside them a pass over the text needs the most room.
    """
    told, itemsize, shape = free_memory(model.device), model.dtype.itemsize, shape_of(model.config)
    free = (UNTOLD if told is None else told) // processes
    vocabulary = model.get_input_embeddings().weight.shape[0]
    widest = max(size for weight in model.parameters() for size in weight.shape if size != vocabulary)
    row = tokens * shape.token_bytes(itemsize) * ROW
    fitting = int((free * PLANNED - tokens * WIDEST * widest * itemsize) // row)
    return -(-asked // -(-asked // max(min(fitting, asked), 1)))


@dataclass(frozen=True, slots=True)
class Answers:
    """What became of a problem's questions under one policy.

    Attributes:
        right: question by question.
        recalls: of each layer over the answers' tokens, by its number in the model; None for one without full
            attention. Empty if it was not measured.
        share: share of the cache that a head attended to, mean over layers with full attention.
    """

    right: tuple[bool, ...]
    recalls: tuple[MeanRecall | None, ...]
    share: float


@dataclass(frozen=True, slots=True)
class Sheet:
    """Some questions as one batch, filled up on the right.

    Attributes:
        tokens: `[R][n]`, each question with its answer but for the last token.
        past: tokens of the text before them.
        real: how many of the rows are questions of their own; those behind repeat the last one.
    """

    asks: tuple[Ask, ...]
    tokens: list[list[int]]
    past: int
    real: int

    @classmethod
    def of(cls, asks: Sequence[Ask], rows_wanted: int, past: int) -> Sheet:
        """A batch of so many rows: a smaller last one is filled up, because the cache has that many."""
        filled_up = (*asks, *[asks[-1]] * (rows_wanted - len(asks)))
        rows = [[*ask.prompt, *ask.answer[:-1]] for ask in filled_up]
        width = max(map(len, rows))
        return cls(filled_up, [row + row[-1:] * (width - len(row)) for row in rows], past, len(asks))

    @property
    def first(self) -> int:
        """The first position behind which an answer's token is expected."""
        return min(len(ask.prompt) for ask in self.asks) - 1

    def answering(self, position: int) -> list[bool]:
        """Which rows' token at `position` is followed by one of the answer."""
        spans = ((len(ask.prompt) - 1, len(ask.prompt) + len(ask.answer) - 1) for ask in self.asks)
        return [row < self.real and begin <= position < end for row, (begin, end) in enumerate(spans)]

    def right(self, logits: Tensor) -> list[bool]:
        """Which rows' answers are the most likely ones, by the logits `[R, n - first, V]` from `first` on."""
        said = zip(self.asks, logits.argmax(-1).tolist(), strict=True)
        behind = ((ask.answer, row[len(ask.prompt) - 1 - self.first :]) for ask, row in said)
        return [tuple(row[: len(answer)]) == answer for answer, row in behind]


@dataclass(frozen=True, slots=True)
class AnswerStep:
    """What `Observer.observe` is given, where some row's next token is one of its answer.

    Attributes:
        position: of the token, counted from the question's first one.
        rows: which rows answer.
    """

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

    def turn_to(self, sheet: Sheet) -> None:
        """Called before every batch with the questions that will be decoded."""
        self.sheet = sheet

    def observe(
        self, layer: int, span: HeadSpan, q: Tensor, kv: KVView, selection: Selection | None, softmax: Softmax
    ) -> None:
        position = kv.rows.max_len - 1 - self.sheet.past
        rows = self.sheet.answering(position)
        if any(rows):
            self.see(AnswerStep(layer, span, q, kv, selection, softmax, position, rows))

    @abstractmethod
    def see(self, step: AnswerStep) -> None:
        """Called for every layer and span of heads of such a token."""


class AnswerRecall(AnswerObserver):
    """Both recalls of each layer."""

    def __init__(self, layers: int | Sequence[int]) -> None:
        self.recall = RecallObserver(layers)

    def see(self, step: AnswerStep) -> None:
        self.recall.observe(step.layer, step.span, step.q, step.kv, step.selection, step.softmax, rows=step.rows)


class Reading:
    """A model with one text in its cache, as often as questions are decoded together.

    `rows` questions are decoded together; None: `rows_that_fit`. Where two tokens are equally likely within rounding,
    answers depend on their number: matrix products of other sizes round otherwise.
    """

    def __init__(self, model: Any, problem: Problem, rows: int | None = None) -> None:
        self._model, self._problem = model, problem
        asked = len(problem.asks)
        self._rows = min(asked, rows or rows_that_fit(model, len(problem.tokens), asked))
        self._reader = Reader(model, problem.tokens)
        self._reader.repeat(self._rows)

    def ask(self, policy: Policy, tokenizer: Any = None, *, recall: bool = True) -> Answers:
        """Decode every question under a policy.

        Args:
            tokenizer: for policies that cut the text into chunks.
            recall: measure both recalls, which costs a pass over the keys per answer token and layer.
        """
        measured = AnswerRecall(shape_of(self._model.config).full_layers)
        answers = self._decode(policy, tokenizer, (measured,) if recall else ())
        layers = tuple(measured.recall.per_layer())
        return replace(answers, recalls=layers if any(layers) else ())

    def observe(self, *observers: AnswerObserver) -> Answers:
        """Decode every question densely, once, before observers' eyes."""
        return self._decode(Policy.from_spec("dense"), None, observers)

    def _decode(self, policy: Policy, tokenizer: Any, observers: Sequence[AnswerObserver]) -> Answers:
        asks, right = self._problem.asks, list[bool]()
        with sparsify(self._model, policy, tokenizer=tokenizer, observers=observers) as run, run.decoding():
            for begin in range(0, len(asks), self._rows):
                sheet = Sheet.of(asks[begin : begin + self._rows], self._rows, len(self._problem.tokens))
                for observer in observers:
                    observer.turn_to(sheet)
                try:
                    logits = self._reader.feed_rows(sheet.tokens, sheet.first, policy.phase)
                    right += sheet.right(logits)[: sheet.real]
                finally:
                    self._reader.crop()
            shares = [run.stats().layers[layer].share for layer in run.plan.roles.concerned]
        return Answers(tuple(right), (), sum(shares) / len(shares))
