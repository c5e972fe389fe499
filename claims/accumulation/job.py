"""The accumulation experiment as the user asked for it, checked from end to end before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saccade.errors import DocumentError, SaccadeError
from saccade.eval.entry import policies_for
from saccade.eval.output import whole_numbers
from saccade.eval.subject import Subject

from ..subject import plain_subject
from .accumulation import TARGETS, Accumulation, Case, cases_of
from .passages import Passage, held_out_passages

_METHODS = ("resa", "tidal", "less_is_more")
"""What is measured unless the user says otherwise: ReSA, and two methods whose sets are made in few layers."""


@dataclass(frozen=True, slots=True)
class AccumulationSettings:
    """What the user can choose; see `python -m claims accumulation --help`. No `policies` means the default ones."""

    model: str | None
    policies: tuple[str, ...]
    kept: str
    every: str
    lengths: str
    sources: str
    passages: int
    sparse_only: int
    batch: int
    output_dir: Path
    device: str
    dtype: str
    seed: int
    threads: int


@dataclass(frozen=True, slots=True)
class AccumulationJob:
    """Settings that passed every check.

    Attributes:
        notes: what the user should know about the plans, each once.
    """

    settings: AccumulationSettings
    subject: Subject
    passages: tuple[Passage, ...]
    cases: tuple[Case, ...]
    notes: tuple[str, ...]

    @classmethod
    def check(cls, settings: AccumulationSettings) -> AccumulationJob:
        """Resolve settings, or raise a SaccadeError about the first that is not valid."""
        subject = plain_subject(settings.model, settings.device, settings.dtype)
        every = whole_numbers("--every", settings.every, at_least=1)
        lengths = tuple(sorted(whole_numbers("--lengths", settings.lengths, at_least=1)))
        templates, said = policies_for(settings.policies, subject.source, _METHODS)
        kept = shares("--kept", settings.kept)
        _check_lengths(lengths, max(*every, TARGETS))
        cases = tuple(
            case
            for length in lengths
            for template in dict.fromkeys(templates)
            for case in cases_of(template, kept, every, length, sparse_only=settings.sparse_only > 0)
        )
        if lengths[-1] > subject.positions:
            raise DocumentError(f"--lengths {lengths[-1]}: the model has {subject.positions} positions")
        plans = [case.policy.plan(subject.shape) for case in cases if case.policy is not None]
        notes = tuple(dict.fromkeys((*said, *(note for plan in plans for note in plan.notes))))
        names = tuple(dict.fromkeys(name.strip() for name in settings.sources.split(",")))
        passages = held_out_passages(
            subject.tokenizer, names, count=settings.passages, shortest=lengths[0], longest=lengths[-1],
            seed=settings.seed,
        )  # fmt: skip
        return cls(settings, subject, tuple(passages), cases, notes)

    def accumulation(self) -> Accumulation:
        """The experiment with its model, ready to run."""
        given = (self.subject.load(), self.subject.tokenizer, self.passages, self.cases)
        return Accumulation(*given, self.settings.sparse_only, self.settings.batch)

    def results(self, experiment: Accumulation) -> dict[str, Any]:
        """What `results.json` holds."""
        texts = f"held out: {self.settings.sources}"
        settings = {**asdict(self.settings), "output_dir": str(self.settings.output_dir)}
        return {
            "targets": TARGETS,
            "settings": settings,
            "rows": experiment.rows(),
            "notes": list(self.notes),
            "environment": self.subject.conditions(
                experiment.model, document=texts, contexts=(), threads=self.settings.threads, seed=self.settings.seed
            ),
        }


def _check_lengths(lengths: Sequence[int], suffix: int) -> None:
    if lengths[0] <= suffix:
        raise SaccadeError(
            f"--lengths {lengths[0]} is not valid: a passage must be longer than its last {suffix} tokens, "
            "which are decoded behind the others"
        )


def shares(option: str, text: str) -> tuple[float, ...]:
    """Read `0.2,0.1`; each share once, in the order given.

    Raises:
        SaccadeError: for anything that is not a list of numbers above 0 and at most 1.
    """
    values = []
    for part in (piece.strip() for piece in text.split(",")):
        try:
            value = float(part)
        except ValueError:
            value = 0.0
        if not 0 < value <= 1:
            raise SaccadeError(f"{option} {part!r} is not valid: shares above 0 and at most 1, joined by commas")
        values.append(value)
    return tuple(dict.fromkeys(values))
