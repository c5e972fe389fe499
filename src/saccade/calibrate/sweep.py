"""Every problem under every candidate policy, text by text; what is done is in the ledger, whatever ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

import torch

from ..eval.interval import wilson
from ..eval.workers import shared_out, workers_for
from ..methods.policy import Policy
from .asking import Reading
from .ledger import Ledger
from .problems import Problems

KEY = ("problem", "spec")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a candidate has achieved.

    Attributes:
        spec: the candidate.
        right: per problem, question by question.
        recall: attention recall of each layer, mean over problems; empty if it was not measured.
        token_recall: the same of token recall.
        share: mean share of the cache that a head attended to.
    """

    spec: str
    right: tuple[tuple[bool, ...], ...]
    recall: tuple[float, ...]
    token_recall: tuple[float, ...]
    share: float

    @property
    def count(self) -> int:
        return sum(map(len, self.right))

    @property
    def correct(self) -> int:
        return sum(map(sum, self.right))

    @property
    def accuracy(self) -> float:
        return self.correct / self.count

    def to_dict(self) -> dict[str, Any]:
        """A row of a results file."""
        return {
            "spec": self.spec,
            "correct": self.correct,
            "n": self.count,
            "accuracy": self.accuracy,
            "interval": wilson(self.correct, self.count),
            "recall": fmean(self.recall) if self.recall else None,
            "recall_per_layer": self.recall,
            "token_recall": fmean(self.token_recall) if self.token_recall else None,
            "token_recall_per_layer": self.token_recall,
            "share_attended": self.share,
        }


@dataclass(frozen=True)
class Sweep:
    """Candidates and problems.

    Attributes:
        model, tokenizer: loaded, in eval mode.
        problems: what is asked.
        ledger: where outcomes are written; its key is `KEY`.
        threads: CPU threads of one worker.
        recall: measure both recalls.
    """

    model: Any
    tokenizer: Any
    problems: Problems
    ledger: Ledger
    threads: int = 1
    recall: bool = True

    def run(self, specs: Sequence[str], advance: Callable[[str], None]) -> None:
        """Ask what the ledger does not hold yet."""
        missing = [
            (number, [spec for spec in specs if not self.ledger.has(number, spec)])
            for number in range(len(self.problems))
        ]
        missing = [(number, open_specs) for number, open_specs in missing if open_specs]
        cores = torch.get_num_threads()
        workers = workers_for(
            len(missing), cores=cores, threads=self.threads, device=self.model.device.type, copied_bytes=0
        )

        def ask(place: int) -> Iterator[dict[str, Any]]:
            return self._ask(*missing[place])

        torch.set_num_threads(self.threads)
        try:
            for record in chain.from_iterable(
                shared_out(lambda place: [*ask(place)], len(missing), workers)
                if workers > 1
                else map(ask, range(len(missing)))
            ):
                self.ledger.add(record)
                advance(record["spec"])
        finally:
            torch.set_num_threads(cores)

    def outcome(self, spec: str) -> Outcome:
        """What a candidate has achieved on all problems."""
        records = [self.ledger.get(number, spec) for number in range(len(self.problems))]
        return Outcome(
            spec,
            tuple(tuple(map(bool, record["right"])) for record in records),
            tuple(fmean(layer) for layer in zip(*(record["recall"] for record in records), strict=True)),
            tuple(fmean(layer) for layer in zip(*(record["token_recall"] for record in records), strict=True)),
            fmean(record["share"] for record in records),
        )

    def _ask(self, number: int, specs: Sequence[str]) -> Iterator[dict[str, Any]]:
        reading = Reading(self.model, self.problems[number])
        for spec in specs:
            answers = reading.ask(Policy.from_spec(spec), self.tokenizer, recall=self.recall)
            yield {
                "problem": number,
                "spec": spec,
                "right": [int(one) for one in answers.right],
                "recall": [round(value, 5) for value in answers.recall],
                "token_recall": [round(value, 5) for value in answers.token_recall],
                "share": round(answers.share, 6),
            }
