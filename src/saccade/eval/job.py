"""A comparison as the user asked for it, checked from end to end before any work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..adapters.hf.probe import Passage
from ..adapters.hf.support import refuse_rewinding
from ..errors import SaccadeError
from ..methods.policy import Policy
from .context import BUILT_IN, Context, benchmark_contexts, built_in_contexts, document_contexts
from .entry import at_budgets, parse_budgets, policies_for
from .subject import Subject
from .tokens import TokenizedText


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """What the user can choose; see `saccade compare --help`. No `policies` means the default ones."""

    model: str | None
    document: Path | None
    policies: tuple[str, ...]
    budget: str
    context: int
    limit: int
    output_dir: Path
    device: str
    dtype: str
    seed: int
    threads: int
    task: Path | None = None
    metric: str | None = None
    probe: bool = False


@dataclass(frozen=True, slots=True)
class ComparisonJob:
    """Settings that passed every check: from here on only the machine can fail.

    Attributes:
        policies: what is compared, the dense baseline first.
        notes: what the user should know about budgets and plans, each once.
    """

    settings: ComparisonSettings
    subject: Subject
    contexts: tuple[Context, ...]
    policies: tuple[Policy, ...]
    notes: tuple[str, ...]

    @classmethod
    def check(cls, settings: ComparisonSettings) -> ComparisonJob:
        """Resolve settings, or raise a SaccadeError: one line about the first that is not valid."""
        subject = Subject.check(settings.model, settings.device, settings.dtype)
        named, said = policies_for(settings.policies, subject.source)
        policies, notes = at_budgets(named, parse_budgets(settings.budget))
        if not settings.policies:
            # What nobody asked for needs no word about being without a budget, but about what it stands for.
            notes = tuple(note for note in notes if "--budget is ignored" not in note)
        planned = [note for policy in policies for note in policy.plan(subject.shape).notes]
        for policy in policies:
            refuse_rewinding(policy, subject.shape)
        options: dict[str, Any] = {"limit": settings.limit, "positions": subject.positions, "seed": settings.seed}
        if settings.task is not None:
            if settings.document is not None:
                raise SaccadeError("--document and --task exclude each other: a task brings its own texts")
            options |= {"metric": settings.metric, "length": settings.context}
            contexts, rows = benchmark_contexts(subject.tokenizer, settings.task, **options)
            if rows > settings.limit:
                notes += (f"the first {settings.limit} of {rows:,} rows of {settings.task.name}; --limit asks more",)
        elif settings.metric is not None:
            raise SaccadeError("--metric scores the rows of a --task file; the built-in questions have their own")
        elif settings.document is not None:
            contexts = document_contexts(subject.tokenizer, settings.document, **options)
        else:
            contexts = built_in_contexts(subject.tokenizer, length=settings.context, **options)
        shortest = Passage((), TokenizedText.of(subject.tokenizer, "").start).shortest
        if settings.probe and (least := min(len(context.tokens) for context in contexts)) < shortest:
            raise SaccadeError(f"--probe is not valid for a text of {least:,} tokens: it needs {shortest:,}")
        subject.refuse_too_large(max(len(context.tokens) for context in contexts))
        return cls(settings, subject, tuple(contexts), policies, tuple(dict.fromkeys((*notes, *said, *planned))))

    def environment(self, model: Any) -> dict[str, Any]:
        """Versions, machine, model and texts."""
        settings, document = self.settings, str(self.settings.task or self.settings.document or BUILT_IN)
        return self.subject.conditions(
            model, document=document, contexts=self.contexts, threads=settings.threads, seed=settings.seed
        )

    def configuration(self) -> dict[str, Any]:
        """The settings with every default and automatic choice resolved, JSON-ready."""
        settings = asdict(self.settings)
        return {
            **settings,
            "model": self.subject.source.location,
            **{name: settings[name] and str(settings[name]) for name in ("document", "task")},
            "output_dir": str(settings["output_dir"]),
            "device": str(self.subject.device),
            "dtype": self.subject.dtype_name,
            "policies": [policy.to_dict() for policy in self.policies],
            "specs": [policy.to_spec() for policy in self.policies],
        }
