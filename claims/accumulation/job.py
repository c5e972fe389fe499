"""The accumulation experiment as the user asked for it, checked from end to end before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from saccade.adapters.hf.support import refuse_unsupported
from saccade.checkpoints.load import ModelSource, pick_device, pick_dtype
from saccade.errors import DocumentError, SaccadeError
from saccade.eval.entry import policies_for
from saccade.eval.environment import environment
from saccade.eval.output import shares, whole_numbers

from .accumulation import TARGETS, Accumulation, Case, cases_of
from .passages import Passage, held_out_passages

_METHODS = ("resa", "tidal", "less_is_more")
"""What is measured unless the user says otherwise: ReSA, and two methods whose sets are made in few layers."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user can choose; see `saccade accumulate --help`. No `policies` means the default ones."""

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

    settings: Settings
    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any
    passages: tuple[Passage, ...]
    cases: tuple[Case, ...]
    notes: tuple[str, ...]

    @classmethod
    def check(cls, settings: Settings) -> AccumulationJob:
        """Resolve settings.

        Raises:
            SaccadeError: one line about the first thing that is not valid.
        """
        source = ModelSource.locate(settings.model)
        every = whole_numbers("--every", settings.every, at_least=1)
        lengths = tuple(sorted(whole_numbers("--lengths", settings.lengths, at_least=1)))
        templates, said = policies_for(settings.policies, source, _METHODS)
        kept = shares("--kept", settings.kept)
        _check_lengths(lengths, max(*every, TARGETS))
        cases = tuple(
            case
            for length in lengths
            for template in dict.fromkeys(templates)
            for case in cases_of(template, kept, every, length, sparse_only=settings.sparse_only > 0)
        )
        device = pick_device(settings.device)
        dtype = pick_dtype(settings.dtype, source, device)
        shape, positions = source.shape()
        if lengths[-1] > positions:
            raise DocumentError(f"--lengths {lengths[-1]}: the model has {positions} positions")
        plans = [case.policy.plan(shape) for case in cases if case.policy is not None]
        notes = tuple(dict.fromkeys((*said, *(note for plan in plans for note in plan.notes))))
        tokenizer = source.tokenizer()
        names = tuple(dict.fromkeys(name.strip() for name in settings.sources.split(",")))
        passages = held_out_passages(
            tokenizer, names, count=settings.passages, shortest=lengths[0], longest=lengths[-1], seed=settings.seed
        )
        return cls(settings, source, device, dtype, tokenizer, tuple(passages), cases, notes)

    def load_model(self) -> Any:
        """The model, on its device.

        Raises:
            SaccadeError: weights that cannot be read, or a model that cannot decode sparsely.
        """
        model = self.source.weights(self.device, self.dtype)
        refuse_unsupported(model)
        return model

    def accumulation(self, model: Any) -> Accumulation:
        """The experiment, ready to run."""
        settings = self.settings
        return Accumulation(
            model=model,
            tokenizer=self.tokenizer,
            passages=self.passages,
            cases=self.cases,
            sparse_only=settings.sparse_only,
            batch=settings.batch,
        )

    def results(self, experiment: Accumulation, *, complete: bool) -> dict[str, Any]:
        """What `results.json` holds."""
        texts = f"held out: {self.settings.sources}"
        settings = {**asdict(self.settings), "output_dir": str(self.settings.output_dir)}
        return {
            "complete": complete,
            "targets": TARGETS,
            "settings": settings,
            "rows": experiment.rows(),
            "notes": list(self.notes),
            "environment": environment(
                experiment.model,
                name=self.source.name,
                document=texts,
                contexts=(),
                threads=self.settings.threads,
                seed=self.settings.seed,
            ),
        }


def _check_lengths(lengths: Sequence[int], suffix: int) -> None:
    if lengths[0] <= suffix:
        raise SaccadeError(
            f"--lengths {lengths[0]} is not valid: a passage must be longer than its last {suffix} tokens, "
            "which are decoded behind the others"
        )
