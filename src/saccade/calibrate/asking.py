"""Asking: a text is prefilled once, densely; its questions are then decoded as rows of one batch, under any policy.

Answers are fed, not sampled. A question is right if every token of its answer is the most likely one behind those
before it, which is when greedy decoding would say it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..adapters.hf.run import sparsify
from ..decode.recall import recall_of
from ..methods.policy import Policy
from ..plans.roles import HeadSpan
from ..types import KVView, Selection
from .problems import Ask, Problem

ROWS_BYTES = 2 * 2**30
"""Most memory that the copies of a text's cache may take, one for each question that is decoded at the same time."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What became of a problem's questions under one policy.

    Attributes:
        right: question by question.
        recall: attention recall of each layer over the answers' tokens, heads that attend to everything counted as 1.
        token_recall: the same of token recall.
        share: share of the cache that a head attended to, mean over layers.
    """

    right: tuple[bool, ...]
    recall: tuple[float, ...]
    token_recall: tuple[float, ...]
    share: float


@dataclass(frozen=True, slots=True)
class Sheet:
    """Some questions as one batch, filled up on the right.

    Attributes:
        asks: the questions.
        tokens: int64 `[R, n]`, each question with its answer but for the last token.
        past: tokens of the text before them.
        real: how many of the rows are questions of their own; those behind repeat the last one.
    """

    asks: tuple[Ask, ...]
    tokens: Tensor
    past: int
    real: int

    @classmethod
    def of(cls, asks: Sequence[Ask], rows_wanted: int, past: int, device: torch.device) -> Sheet:
        """A batch of so many rows: a smaller last one is filled up, because the cache has that many."""
        filled_up = [*asks, *[asks[-1]] * (rows_wanted - len(asks))]
        rows = [[*ask.prompt, *ask.answer[:-1]] for ask in filled_up]
        width = max(map(len, rows))
        filled = [row + row[-1:] * (width - len(row)) for row in rows]
        return cls(tuple(filled_up), torch.tensor(filled, device=device), past, len(asks))

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
        said = logits.argmax(-1).tolist()
        begins = [len(ask.prompt) - 1 - self.first for ask in self.asks]
        return [
            tuple(row[begin : begin + len(ask.answer)]) == ask.answer
            for row, ask, begin in zip(said, self.asks, begins, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class AnswerStep:
    """What `Observer.observe` is given, where some row's next token is one of its answer.

    Attributes:
        position: of the token, counted from the question's first one.
        rows: which rows answer.
    """

    layer: int
    q: Tensor
    kv: KVView
    selection: Selection | None
    scale: float
    position: int
    rows: list[bool]


class AnswerObserver(ABC):
    """Base of observers that look at answers only: `see` gets the queries whose next token is one of the answer.

    Attributes:
        sheet: the questions being decoded; set before every batch.
    """

    sheet: Sheet

    def observe(
        self, layer: int, span: HeadSpan, q: Tensor, kv: KVView, selection: Selection | None, scale: float
    ) -> None:
        position = kv.rows.max_len - 1 - self.sheet.past
        rows = self.sheet.answering(position)
        if any(rows):
            self.see(AnswerStep(layer, q, kv, selection, scale, position, rows))

    @abstractmethod
    def see(self, step: AnswerStep) -> None:
        """Called for every layer and span of heads of such a token."""


class AnswerRecall(AnswerObserver):
    """Both recalls of each layer, over the answers' tokens."""

    def __init__(self, layers: int) -> None:
        self._sums = torch.zeros(layers, 2, dtype=torch.float64)
        self._weights = [0] * layers

    def see(self, step: AnswerStep) -> None:
        heads, count = step.q.shape[1], sum(step.rows)
        self._weights[step.layer] += count * heads
        if step.selection is None:
            self._sums[step.layer] += count * heads
            return
        chosen = torch.tensor(step.rows)
        both = torch.stack(recall_of(step.q, step.kv, step.selection, scale=step.scale)).cpu()[:, chosen]
        self._sums[step.layer] += both.double().sum((1, 2))

    @property
    def means(self) -> list[list[float]]:
        """`[L, 2]`: attention and token recall."""
        return (self._sums / torch.tensor(self._weights, dtype=torch.float64)[:, None]).tolist()


class Reading:
    """A model with one text in its cache, as often as questions are decoded together.

    Args:
        model: loaded, in eval mode.
        problem: what is read.
        rows: questions decoded together; None: as many as `ROWS_BYTES` of cache allow.
    """

    def __init__(self, model: Any, problem: Problem, rows: int | None = None) -> None:
        self._model, self._problem = model, problem
        self._device = next(model.parameters()).device
        self._cache = DynamicCache()
        with torch.inference_mode():
            tokens = torch.tensor([problem.tokens], device=self._device)
            model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            layers: list[Any] = list(self._cache.layers)
            size = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
            self._rows = min(len(problem.asks), rows or max(ROWS_BYTES // size, 1))
            self._cache.batch_repeat_interleave(self._rows)

    def ask(self, policy: Policy, tokenizer: Any = None, *, recall: bool = True) -> Answers:
        """Decode every question under a policy.

        Args:
            policy: what decodes.
            tokenizer: for policies that cut the text into chunks.
            recall: measure both recalls, which costs a pass over the keys per answer token and layer.
        """
        measured = AnswerRecall(self._model.config.num_hidden_layers)
        right, share = self._decode(policy, tokenizer, (measured,) if recall else ())
        means = measured.means if recall else []
        return Answers(tuple(right), tuple(a for a, _ in means), tuple(t for _, t in means), share)

    def observe(self, *observers: AnswerObserver) -> Answers:
        """Decode every question densely, once, before observers' eyes."""
        right, share = self._decode(Policy.from_spec("dense"), None, observers)
        return Answers(tuple(right), (), (), share)

    def _decode(self, policy: Policy, tokenizer: Any, observers: Sequence[AnswerObserver]) -> tuple[list[bool], float]:
        asks, right = self._problem.asks, list[bool]()
        every = None if policy.rectify is None else policy.rectify.every
        with (
            torch.inference_mode(),
            sparsify(self._model, policy, tokenizer=tokenizer, observers=observers) as run,
            run.decoding(),
        ):
            for begin in range(0, len(asks), self._rows):
                sheet = Sheet.of(asks[begin : begin + self._rows], self._rows, self._past, self._device)
                for observer in observers:
                    observer.sheet = sheet
                try:
                    right += sheet.right(self._feed(sheet, every))[: sheet.real]
                finally:
                    # To a length: after an error in the middle of a pass not all layers have as many tokens too many.
                    self._cache.crop(self._past)
            layers = run.stats().layers
        return right, sum(layer.share for layer in layers) / len(layers)

    @property
    def _past(self) -> int:
        return len(self._problem.tokens)

    def _feed(self, sheet: Sheet, every: int | None) -> Tensor:
        """Logits `[R, n - first, V]` of a sheet; tokens go together as far as no dense pass falls among them."""
        width, done, parts = sheet.tokens.shape[1], 0, []
        while done < width:
            together = width - done if every is None else min(width - done, max(every - done % (every + 1), 1))
            keep = max(done + together - max(sheet.first, done), 1)
            ids = sheet.tokens[:, done : done + together]
            logits = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=keep).logits
            done += together
            if done > sheet.first:
                parts.append(logits)
        return torch.cat(parts, dim=1)
