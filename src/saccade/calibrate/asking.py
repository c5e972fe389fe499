"""Asking: a text is prefilled once, densely; its questions are then decoded as rows of one batch, under any policy.

Answers are fed, not sampled. A question is right if every token of its answer is the most likely one behind those
before it, which is when greedy decoding would say it.
"""

from collections.abc import Sequence
from typing import Any

from ..adapters.hf.run import sparsify
from ..checkpoints.shape import shape_of
from ..eval.reader import Reader, rows_that_fit
from ..eval.sheet import AnswerObserver, AnswerRecall, Row, Sheet
from ..methods.policy import Policy
from .problems import Problem


class Reading:
    """A model with one text in its cache, as often as questions are decoded together.

    `rows` questions are decoded together; None: `rows_that_fit`. Where two tokens are equally likely within rounding,
    answers depend on their number: matrix products of other sizes round otherwise.
    """

    def __init__(self, model: Any, problem: Problem, rows: int | None = None) -> None:
        self._model, self._problem = model, problem
        asked, text = len(problem.asks), len(problem.tokens)
        self._rows = min(asked, rows or rows_that_fit(model, text, problem.positions(together=False) - text, asked))
        self._reader = Reader(model, problem.tokens)
        self._reader.repeat(self._rows)

    def ask(self, policy: Policy, tokenizer: Any = None, *, recall: bool = True) -> dict[str, Any]:
        """Decode every question under a policy; what became of them, JSON-ready.

        `right`: question by question. `recalls`: of each layer over the answers' tokens, by its number in the model;
        None for one without full attention; empty if it was not measured. `share`: of the cache that a head attended
        to, mean over layers with full attention.

        Args:
            tokenizer: for policies that cut the text into chunks.
            recall: measure both recalls, which costs a pass over the keys per answer token and layer.
        """
        measured = AnswerRecall(shape_of(self._model.config).full_layers)
        right, share = self._decode(policy, tokenizer, (measured,) if recall else ())
        layers = measured.recall.per_layer() if recall else []
        recalls = [layer and [value and round(value, 5) for value in layer] for layer in layers]
        return {"right": [int(one) for one in right], "recalls": recalls, "share": round(share, 6)}

    def observe(self, *observers: AnswerObserver) -> list[bool]:
        """Decode every question densely, once, before observers' eyes; which ones were right."""
        return self._decode(Policy.from_spec("dense"), None, observers)[0]

    def _decode(self, policy: Policy, tokenizer: Any, observers: Sequence[AnswerObserver]) -> tuple[list[bool], float]:
        asks, past, right = self._problem.asks, len(self._problem.tokens), list[bool]()
        with sparsify(self._model, policy, tokenizer=tokenizer, observers=observers) as run, run.decoding():
            for begin in range(0, len(asks), self._rows):
                part = asks[begin : begin + self._rows]
                given = ((ask, [*ask.prompt, *ask.answer]) for ask in part)
                rows = [Row(tokens, len(ask.prompt), ask.gold, len(tokens) - 1) for ask, tokens in given]
                sheet, fed = Sheet.of(rows, self._rows, past), max(len(row.tokens) for row in rows) - 1
                for observer in observers:
                    observer.turn_to(sheet)
                try:
                    logits = self._reader.feed_rows(sheet.fed(0, fed), sheet.first, policy.phase)
                    right += sheet.right(logits)[: len(part)]
                finally:
                    self._reader.crop()
            shares = [run.stats().layers[layer].share for layer in run.plan.roles.concerned]
        return right, sum(shares) / len(shares)
