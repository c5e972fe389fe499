"""Settings of the upkeep experiment, checked before any work, and what its results file holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from saccade.checkpoints.text import delimiter_table
from saccade.errors import DocumentError, SaccadeError
from saccade.eval.output import whole_numbers
from saccade.eval.subject import Subject
from saccade.plans.plan import Plan
from saccade.recipes.machine import environment
from saccade.text.levels import break_codes

from ..subject import plain_subject
from .names import CLUSTERS, VARIANTS, Upkeep
from .texts import Stretch, stretches
from .upkeep import Experiment


@dataclass(frozen=True, slots=True)
class UpkeepSettings:
    """What the user can choose; see `python -m claims upkeep --help`."""

    model: str | None
    budget: str
    variants: str
    prompt: int
    tokens: int
    every: int
    queries: int
    spacing: int
    texts: int
    device: str
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True)
class UpkeepJob:
    """Settings that passed every check."""

    settings: UpkeepSettings
    subject: Subject
    variants: tuple[str, ...]
    plans: Mapping[tuple[Upkeep, int], Plan]
    texts: tuple[Stretch, ...]
    layers: tuple[int, ...]

    @classmethod
    def check(cls, settings: UpkeepSettings) -> UpkeepJob:
        """Resolve settings, or raise a SaccadeError about the first that is not valid."""
        subject = plain_subject(settings.model, settings.device, settings.dtype)
        names = tuple(dict.fromkeys(name.strip() for name in settings.variants.split(",")))
        for name in names:
            if name not in VARIANTS:
                raise SaccadeError(f"--variants {name!r} is not valid; choose among {', '.join(VARIANTS)}")
        span = (settings.queries - 1) * settings.spacing + 1
        if span > settings.every:
            raise SaccadeError(
                f"--every {settings.every} is not valid: a measurement takes {span} tokens (--queries, --spacing)"
            )
        budgets = whole_numbers("--budget", settings.budget, at_least=1)
        upkeeps = dict.fromkeys(VARIANTS[name].upkeep for name in names)
        plans = {(own, budget): own.bound(budget).plan(subject.shape) for budget in budgets for own in upkeeps}
        layers = Upkeep(CLUSTERS).bound(budgets[0]).plan(subject.shape).refreshing
        length = settings.prompt + settings.tokens // settings.every * settings.every + span
        if length > subject.positions:
            raise DocumentError(f"{length} tokens, prompt and decoded: the model has {subject.positions} positions")
        texts = stretches(subject.tokenizer, settings.texts, length)
        return cls(settings, subject, names, plans, texts, tuple(sorted(layers)))

    def experiment(self) -> Experiment:
        """The experiment with its model, ready to run."""
        model, levels = self.subject.load(), delimiter_table(self.subject.tokenizer, break_codes)
        sizes = {name: getattr(self.settings, name) for name in ("prompt", "tokens", "every", "queries", "spacing")}
        return Experiment(model, levels, self.texts, self.plans, self.variants, self.layers, **sizes)

    def results(self, experiment: Experiment) -> dict[str, Any]:
        """What the JSON file holds; see docs/experiments.md."""
        subject = self.subject
        return {
            "model": subject.source.name,
            "settings": asdict(self.settings),
            "layers": list(self.layers),
            "texts": [text.source for text in self.texts],
            "rows": experiment.rows(),
            "differences": experiment.differences(),
            "environment": environment(threads=self.settings.threads, dtype=subject.dtype, device=subject.device),
        }
