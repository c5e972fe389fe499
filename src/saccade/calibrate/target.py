"""What every calibration starts from: a model that can be attached, its sizes, and problems that fit it."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ..adapters.hf.support import refuse_unsupported
from ..checkpoints.load import ModelSource, pick_device, pick_dtype
from ..checkpoints.shape import shape_of_model
from ..errors import DocumentError, OutputError, SaccadeError
from ..eval.output import check_folder
from ..machine import versions
from ..methods.policy import Policy
from ..plans.identity import refuse_other
from ..recipes.recipe import NAME, Recipe
from ..recipes.resolve import beside
from ..types import ModelShape
from .problems import TASKS, NeedleProblems, Problems, needles_in
from .task_file import FileProblems

LONGEST = 32_768
ROOM = 256
"""Positions for a question and its answer where a context is chosen for the user."""
ASKED = 12
"""Questions per text."""
SEEDS_APART = 1_000_000
"""Needles and stretches for different uses come from seeds this far apart."""
TUNING, CHOOSING_HEADS, TRAINING = 3, 1000, 2000
"""Which of them judge policies, give the retrieval score, and train; the first, 0, are for finding layers and heads."""


@dataclass(frozen=True, slots=True)
class Common:
    """Settings that all calibrations share; see `saccade calibrate layers --help`."""

    model: str | None
    task: str
    context: int
    questions: int
    output_dir: Path
    recipe: Path | None
    device: str
    dtype: str
    seed: int
    threads: int


@dataclass(frozen=True, slots=True)
class Target:
    """Common settings that passed every check.

    Attributes:
        shape: sizes, from the configuration alone.
        positions: the longest row that the model takes.
    """

    settings: Common
    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any
    shape: ModelShape
    positions: int

    @classmethod
    def check(cls, settings: Common) -> Target:
        """Resolve settings.

        Raises:
            SaccadeError: one line about the first setting that is not valid.
        """
        if settings.task not in TASKS and not settings.task.endswith(".jsonl"):
            raise SaccadeError(f"--task {settings.task!r} is not valid: {', '.join(TASKS)}, or a file FILE.jsonl")
        source = ModelSource.locate(settings.model)
        device = pick_device(settings.device)
        dtype = pick_dtype(settings.dtype, source, device)
        shape, positions = source.shape()
        target = cls(settings, source, device, dtype, source.tokenizer(), shape, positions)
        check_folder(settings.output_dir)
        try:
            with tempfile.TemporaryFile(dir=target.recipe_path.parent):
                pass
        except OSError as error:
            raise OutputError(f"recipe {str(target.recipe_path)!r} cannot be written: {error.strerror}") from error
        return target

    def problems(self, *, seed: int = 0) -> Problems:
        """Problems of the chosen task, a dozen questions per text, as many texts as `--questions` need.

        Args:
            seed: which of the seeds apart from each other; a file has one set of texts for all.

        Raises:
            DocumentError: a context or a task file that does not fit the model.
        """
        context = self.settings.context
        asked = 0 if self.from_file else min(ASKED, needles_in(self.settings.task, context))
        count = 0 if self.from_file else -(-self.settings.questions // asked)
        return self._problems(asked, seed, (context, context), count, together=False)

    def training_problems(self, *, asked: int, seed: int, lengths: tuple[int, int], count: int) -> Problems:
        """Problems whose questions all follow their text at once; `count` texts of lengths between two.

        Raises:
            DocumentError: lengths or a task file that do not fit the model.
        """
        return self._problems(asked, seed, lengths, count, together=True)

    @property
    def from_file(self) -> bool:
        """Whether the task is the user's own."""
        return self.settings.task not in TASKS

    def _problems(self, asked: int, seed: int, lengths: tuple[int, int], count: int, *, together: bool) -> Problems:
        if self.from_file:
            path = Path(self.settings.task)
            return FileProblems(self.tokenizer, path, positions=self.positions, together=together)
        return NeedleProblems(
            self.tokenizer,
            self.settings.task,
            lengths=lengths,
            count=count,
            asked=asked,
            seed=self.settings.seed + SEEDS_APART * seed,
            positions=self.positions,
            together=together,
        )

    def load(self) -> Any:
        """The model, on its device.

        Raises:
            SaccadeError: weights that cannot be read, or a model that cannot decode sparsely.
        """
        model = self.source.weights(self.device, self.dtype)
        refuse_unsupported(model)
        return model

    def about(self) -> dict[str, Any]:
        """What results depend on, JSON-ready; neither where they are written nor how many threads made them."""
        settings = self.settings
        return {
            "model": self.source.location if not self.source.bundled else self.source.name,
            "weights": self.shape.weights,
            "task": settings.task,
            "texts_of": self._texts_of(),
            "context": settings.context,
            "questions": settings.questions,
            "seed": settings.seed,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def _texts_of(self) -> str:
        """Which texts a task has: the Python whose library they are, or a hash of the user's file."""
        if not self.from_file:
            return f"Python {sys.version_info.major}.{sys.version_info.minor}"
        try:
            return hashlib.sha256(Path(self.settings.task).read_bytes()).hexdigest()[:16]
        except OSError as error:
            raise DocumentError(f"task file {self.settings.task!r} cannot be read: {error.strerror}") from None

    @property
    def recipe_path(self) -> Path:
        return self.settings.recipe or self.settings.output_dir / NAME

    def earlier(self, model: Any) -> Recipe | None:
        """What is already known of the model: the recipe that will be replaced, or the one beside the model.

        Raises:
            PolicyError: a recipe that cannot be read, or another model's.
        """
        shape = shape_of_model(model)
        if self.recipe_path.exists():
            recipe = Recipe.read(self.recipe_path)
            refuse_other(f"recipe {self.recipe_path}", recipe.model, shape)
            return recipe
        return beside(self.source.location, lambda: shape)

    def write_recipe(
        self,
        command: str,
        policy: Policy,
        shape: ModelShape,
        earlier: Recipe | None,
        *,
        found: Mapping[str, Any],
        scores: Mapping[str, Any],
        reselect: tuple[int, ...] | None = None,
        roles: str | None = None,
    ) -> None:
        """Write what a command has found; what earlier ones found for this model stays, each under its command's name.

        Raises:
            OutputError: if it cannot be written; an earlier recipe is then as it was.
        """
        before = (earlier.found, earlier.scores) if earlier is not None else ({}, {})
        if earlier is not None:
            reselect = earlier.reselect if reselect is None else reselect
            roles = earlier.roles if roles is None else roles
        about = {"date": date.today().isoformat(), **self.about(), **found}
        Recipe(
            shape, policy, reselect, roles, {**before[0], command: about}, {**before[1], command: dict(scores)}
        ).write(self.recipe_path)

    def environment(self) -> dict[str, Any]:
        """What made a result."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)
        return {"device": device, "threads": self.settings.threads, **versions()}


def default_context(model: str | None) -> int:
    """`LONGEST` tokens, or as many as the model has positions for with a question behind them.

    Raises:
        SaccadeError: a model that cannot be read.
    """
    return min(LONGEST, ModelSource.locate(model).shape()[1] - ROOM)
