"""What judges candidates of `saccade tune`: key tokens of texts, or right answers to a file's questions."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy

from ..adapters.hf.probe import KINDS, TOLD, Passage, texts_that_fit
from ..errors import SaccadeError
from ..eval.divergence import probed
from ..methods.policy import Policy
from .layers import PROBED
from .ledger import Ledger
from .passages import Texts
from .promise import Tally
from .sweep import KEY, Sweep
from .target import Target
from .task_file import FileProblems

DENSE = "dense"


@dataclass(frozen=True)
class KeyTokens:
    """Key tokens of passages, as they are and repeated.

    Attributes:
        option: how the user says what he wants.
        standard: what is tried beside candidates.
        asked: tokens or questions of a text, at most.
    """

    target: Target
    texts: Texts
    passages: tuple[Passage, ...]
    option: str = "agreement"
    standard: tuple[str, ...] = ()
    asked: int = TOLD

    @property
    def name(self) -> str:
        """Where texts come from."""
        return self.texts.name

    def __len__(self) -> int:
        return len(self.passages)

    @contextmanager
    def sweep(self, model: Any) -> Iterator[Sweep]:
        """Tries candidates; what the folder's ledger holds is not tried again."""
        settings = self.target.settings
        about = {**self.target.about(), "seed": settings.seed, "texts": self.name}
        about |= {"passages": self.texts.sha256(self.passages)}
        with Ledger(settings.output_dir / PROBED, about, KEY) as ledger:
            yield _Probing(model, self.target.subject.tokenizer, self.passages, ledger, settings.threads)

    def tallies(self, sweep: Sweep, spec: str) -> Sequence[Tally]:
        """Of each kind of what a candidate was asked, over the sweep's texts."""
        records = [sweep.ledger.records[number, spec] for number in sweep.numbers]
        found = []
        for kind in KINDS:
            keys, equal = (numpy.array([one[kind][what] for one in records]) for what in ("keys", "key_equal"))
            found.append((keys - equal, 0 * keys, keys))
        return found

    def refuse(self, sweep: Sweep) -> None:
        """Raise a SaccadeError if candidates cannot be told apart by the sweep's texts."""
        numbers = {*sweep.numbers}
        records = [one for one in sweep.ledger.records.values() if one["problem"] in numbers]
        if not any(one[kind]["keys"] for one in records for kind in KINDS):
            what = "no token needs a long context, so no candidate can be told from another"
            raise SaccadeError(f"{self.texts.name}: {what}; choose other --texts")


@dataclass(frozen=True)
class Answers:
    """Right answers to questions of the user's; as `KeyTokens`."""

    target: Target
    problems: FileProblems
    option: str = "quality"
    standard: tuple[str, ...] = (DENSE,)

    @property
    def name(self) -> str:
        return self.target.settings.task

    @property
    def asked(self) -> int:
        return len(self.problems[0].asks)

    def __len__(self) -> int:
        return len(self.problems)

    def sweep(self, model: Any) -> AbstractContextManager[Sweep]:
        return self.target.sweep(model, self.problems, recall=False)

    def tallies(self, sweep: Sweep, spec: str) -> Sequence[Tally]:
        dense, own = (numpy.array(sweep.outcome(one).right, dtype=bool) for one in (DENSE, spec))
        return [((dense & ~own).sum(1), (own & ~dense).sum(1), dense.sum(1))]

    def refuse(self, sweep: Sweep) -> None:
        dense = sweep.outcome(DENSE)
        self.target.refuse_unanswered(dense.correct, dense.count, "there is nothing to keep")


Judged = KeyTokens | Answers
"""Texts, by number."""


@dataclass(frozen=True)
class _Probing(Sweep):
    """Candidates on passages, whose key tokens are told."""

    problems: Any

    @property
    def most(self) -> int:
        return texts_that_fit(self.model, max(len(one.tokens) for one in self.problems))

    def ask(self, number: int, specs: Sequence[str]) -> Iterator[dict[str, Any]]:
        kept = probed(self.model, self.tokenizer, self.problems[number], [*map(Policy.from_spec, specs)])
        for spec, told in zip(specs, kept, strict=True):
            yield {"problem": number, "spec": spec, **told}
