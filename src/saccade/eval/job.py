"""A comparison as the user asked for it, checked from end to end before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..adapters.hf.support import refuse_unsupported
from ..checkpoints.load import ModelSource, pick_device, pick_dtype
from .comparison import Comparison
from .context import BUILT_IN, Context, built_in_contexts, document_contexts
from .entry import Entry, make_entries, parse_budgets, policies_for
from .environment import environment
from .folder import ResultsFolder


@dataclass(frozen=True, slots=True)
class Settings:
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


@dataclass(frozen=True, slots=True)
class Job:
    """Settings that passed every check: from here on only the machine can fail.

    Attributes:
        notes: what the user should know about budgets and plans, each once.
    """

    settings: Settings
    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any
    contexts: tuple[Context, ...]
    entries: tuple[Entry, ...]
    notes: tuple[str, ...]

    @classmethod
    def check(cls, settings: Settings) -> Job:
        """Resolve settings.

        Raises:
            SaccadeError: one line about the first thing that is not valid.
        """
        source = ModelSource.locate(settings.model)
        policies, said = policies_for(settings.policies, source)
        entries, notes = make_entries(policies, parse_budgets(settings.budget))
        if not settings.policies:
            # What nobody asked for needs no word about being without a budget, but about what it stands for.
            notes = tuple(note for note in notes if "--budget is ignored" not in note)
        device = pick_device(settings.device)
        dtype = pick_dtype(settings.dtype, source, device)
        shape, positions = source.shape()
        plans = [entry.policy.plan(shape) for entry in entries]
        tokenizer = source.tokenizer()
        contexts = _contexts(settings, tokenizer, positions)
        notes = (*notes, *said, *(note for plan in plans for note in plan.notes))
        return cls(settings, source, device, dtype, tokenizer, tuple(contexts), entries, tuple(dict.fromkeys(notes)))

    def load_model(self) -> Any:
        """The model, on its device.

        Raises:
            ModelFolderError: weights that cannot be read.
            UnsupportedModelError: a model that cannot decode sparsely.
        """
        model = self.source.weights(self.device, self.dtype)
        refuse_unsupported(model)
        return model

    def environment(self, model: Any) -> dict[str, Any]:
        """Versions, machine, model and texts."""
        document = BUILT_IN if self.settings.document is None else str(self.settings.document)
        return environment(
            model,
            name=self.source.name,
            document=document,
            contexts=self.contexts,
            threads=self.settings.threads,
            seed=self.settings.seed,
        )

    def configuration(self) -> dict[str, Any]:
        """The settings with every default and automatic choice resolved, JSON-ready."""
        settings = asdict(self.settings)
        return {
            **settings,
            "model": self.source.location,
            "document": None if settings["document"] is None else str(settings["document"]),
            "output_dir": str(settings["output_dir"]),
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "policies": [entry.policy.to_dict() for entry in self.entries],
            "specs": [entry.spec for entry in self.entries],
        }

    def comparison(self, model: Any, folder: ResultsFolder) -> Comparison:
        """The work itself, ready to run."""
        return Comparison(
            model=model,
            tokenizer=self.tokenizer,
            contexts=self.contexts,
            entries=self.entries,
            folder=folder,
            threads=self.settings.threads,
        )


def _contexts(settings: Settings, tokenizer: Any, positions: int) -> Sequence[Context]:
    options = {"limit": settings.limit, "positions": positions, "seed": settings.seed}
    if settings.document is not None:
        return document_contexts(tokenizer, settings.document, **options)
    return built_in_contexts(tokenizer, length=settings.context, **options)
