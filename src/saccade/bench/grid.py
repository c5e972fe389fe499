"""What a benchmark is repeated at: contexts, batches and numbers of threads, each with each."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from ..checkpoints.load import DTYPES, pick_device
from ..checkpoints.presets import read_config
from ..checkpoints.shape import shape_of
from ..errors import SaccadeError
from ..eval.entry import at_budgets, parse_budgets
from ..eval.output import whole_numbers
from ..methods.policy import Policy
from ..recipes.machine import environment
from ..recipes.resolve import resolve_all
from ..types import ModelShape

OnUnit = Callable[[str, dict[str, Any]], None]
"""Called after every setting with its name and all results so far."""


@dataclass(frozen=True, slots=True)
class GridSettings:
    """What the user says of every benchmark; lists hold numbers joined by commas."""

    shape: str
    contexts: Sequence[str]
    batches: Sequence[str]
    threads: Sequence[str]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class PolicySettings(GridSettings):
    """What the user says of a benchmark of policies; no steps are the device's default."""

    policies: Sequence[str]
    budgets: Sequence[str]
    steps: int | None

    def resolve(self, shape: ModelShape) -> tuple[tuple[Policy, ...], tuple[str, ...]]:
        """Policies at every budget, dense first, and notes; a SaccadeError if one is none or does not fit the shape."""
        # The weights are random ones: a recipe is held against the sizes.
        chosen, said = resolve_all(self.policies, self.shape, lambda: shape)
        policies, notes = at_budgets(chosen, parse_budgets(",".join(self.budgets)))
        plans = [policy.plan(shape) for policy in policies]
        guesses = (note for plan in plans if plan.guessed is not None for note in plan.notes)
        return policies, tuple(dict.fromkeys((*said, *notes, *guesses)))


@dataclass(frozen=True, slots=True)
class Grid:
    """Checked settings.

    Attributes:
        name: of the shape, as the user gave it.
        config: the model's.
    """

    name: str
    config: Any
    shape: ModelShape
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def check(cls, settings: GridSettings, *, shortest: int = 1) -> Grid:
        """Read settings, contexts of at least `shortest` tokens; or raise a SaccadeError about the first not valid."""
        config = read_config(settings.shape)
        if settings.dtype not in DTYPES:
            raise SaccadeError(f"unknown dtype {settings.dtype!r}; valid: {', '.join(DTYPES)}")
        return cls(
            settings.shape,
            config,
            shape_of(config),
            contexts=whole_numbers("context", ",".join(settings.contexts), at_least=shortest),
            batches=whole_numbers("batch", ",".join(settings.batches), at_least=1),
            threads=whole_numbers("threads", ",".join(settings.threads), at_least=1),
            dtype=DTYPES[settings.dtype],
            device=pick_device(settings.device),
        )

    @property
    def served(self) -> bool:
        """Whether engines run as a server's do: in processes of their own, on an accelerator."""
        return self.device.type == "cuda"

    def results(self, **more: Any) -> dict[str, Any]:
        """What the JSON file holds before anything is measured."""
        torch.set_num_threads(max(self.threads))
        here = environment(threads=max(self.threads), dtype=self.dtype, device=self.device)
        return {"shape": self.name, **more, "rows": [], "environment": here}

    def run(
        self, results: dict[str, Any], measure: Callable[[int, int, int], Iterable[Any]], on_unit: OnUnit
    ) -> dict[str, Any]:
        """Add the rows that `measure` gives for every context, batch and number of threads."""
        for context, batch, threads in product(self.contexts, self.batches, self.threads):
            torch.set_num_threads(threads)
            results["rows"] += [asdict(row) for row in measure(context, batch, threads)]
            on_unit(f"context {context}, batch {batch}, threads {threads}", results)
        return results


def parse_points(given: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """Read contexts and batches such as `16x1,131072x4`, in their order; a SaccadeError about the first not valid."""
    points = []
    for text in ",".join(given).split(",") if given else ():
        context, _, batch = text.strip().partition("x")
        if not (re.fullmatch("[0-9]+x[0-9]+", text.strip()) and int(context) and int(batch)):
            raise SaccadeError(f"point {text.strip()!r} is not valid: CONTEXTxBATCH, such as 131072x4")
        points.append((int(context), int(batch)))
    return tuple(dict.fromkeys(points))


@dataclass(frozen=True, slots=True)
class GridJob(ABC):
    """A checked benchmark.

    Attributes:
        notes: what the user should know about policies and budgets, each once.
    """

    grid: Grid
    notes: tuple[str, ...]

    @property
    def units(self) -> int:
        """How often `run` tells of results."""
        return len(self.grid.contexts) * len(self.grid.batches) * len(self.grid.threads)

    @abstractmethod
    def run(self, on_unit: OnUnit) -> dict[str, Any]:
        """Measure everything; gives what the JSON file holds."""
