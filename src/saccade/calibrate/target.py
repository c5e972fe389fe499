"""What every calibration starts from and ends with: a model, problems that fit it, a folder, and a recipe."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ..errors import DocumentError, SaccadeError
from ..eval.benchmark import SUFFIXES
from ..eval.output import check_folder, write_json, writing
from ..eval.reader import rows_that_fit
from ..eval.subject import Subject
from ..eval.workers import workers_for
from ..methods.policy import Policy
from ..plans.identity import refuse_other
from ..recipes.machine import device_name, kernels_on, versions
from ..recipes.recipe import NAME, Recipe
from ..recipes.resolve import beside
from ..types import ModelShape
from .ledger import Ledger, held
from .problems import TASKS, NeedleProblems, Problems, needles_in
from .sweep import KEY, Sweep
from .task_file import FileProblems

LEDGER = "answers.jsonl"
ASKED = 12
"""Questions per text."""
SEEDS_APART = 1_000_000
"""Needles and stretches for different uses come from seeds this far apart."""
CHOOSING_HEADS, TRAINING = 1000, 2000
"""Which of them give the retrieval score, and train; the first, 0, are for finding layers and heads."""


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """Settings that all calibrations share; see `saccade calibrate layers --help`. No `task`: nothing is asked."""

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
    """Settings that passed every check.

    Attributes:
        left: what `without_known` has left of a file of the user's.
    """

    settings: TargetSettings
    subject: Subject
    left: FileProblems | None = None

    @classmethod
    def check(cls, settings: TargetSettings) -> Target:
        """Resolve settings, or raise a SaccadeError: one line about the first that is not valid."""
        if settings.task and settings.task not in TASKS and not settings.task.endswith(SUFFIXES):
            valid = ", ".join((*TASKS, *(f"or a file FILE{suffix}" for suffix in SUFFIXES)))
            raise SaccadeError(f"--task {settings.task!r} is not valid: {valid}")
        target = cls(settings, Subject.check(settings.model, settings.device, settings.dtype))
        if not target.from_file:
            target.subject.refuse_too_large(settings.context)
        check_folder(settings.output_dir)
        with writing(target.recipe_path, "recipe "):
            tempfile.TemporaryFile(dir=target.recipe_path.parent).close()
        return target

    @property
    def from_file(self) -> bool:
        """Whether the task is the user's own."""
        return self.settings.task not in ("", *TASKS)

    def problems(self, seed: int = 0) -> Problems:
        """Problems of the chosen task, a dozen questions per text, as many texts as `--questions` need; see `draw`."""
        context = self.settings.context
        asked = ASKED if self.from_file else min(ASKED, needles_in(self.settings.task, context))
        return self.draw(seed, asked, (context, context), -(-self.settings.questions // asked))

    def draw(self, seed: int, asked: int, lengths: tuple[int, int], count: int, *, together: bool = False) -> Problems:
        """Problems of `count` texts as in `NeedleProblems`; a file of the user's is always the same.

        `seed` is which of the seeds apart from each other. Raises a DocumentError for what does not fit the model.
        """
        if self.left is not None:
            return self.left
        tokenizer, positions, task = self.subject.tokenizer, self.subject.positions, self.settings.task
        if self.from_file:
            return FileProblems(tokenizer, Path(task), positions=positions, together=together)
        start = self.settings.seed + SEEDS_APART * seed
        return NeedleProblems(tokenizer, task, lengths, count, asked, start, positions, together)

    def without_known(self, model: Any) -> Target:
        """Of a file of the user's, the questions alone that need their text; see `FileProblems.without_known`."""
        path, positions = Path(self.settings.task), self.subject.positions
        return replace(self, left=FileProblems(self.subject.tokenizer, path, positions=positions).without_known(model))

    def refuse_made(self) -> None:
        """Raise a SaccadeError unless the task is a file: facts that are made up cannot be known beforehand."""
        if not self.from_file:
            raise SaccadeError(f"--drop-known is not valid with --task {self.settings.task}, which is no file")

    def about(self) -> dict[str, Any]:
        """What results depend on, JSON-ready; neither where they are written nor how many threads made them."""
        settings, source = self.settings, self.subject.source
        asked = ("task", "context", "questions", "seed") if settings.task else ("context",)
        return {
            "model": source.name if source.bundled else source.location,
            "weights": self.subject.shape.weights,
            **({"texts_of": self._texts_of()} if settings.task else {}),
            **({"drop_known": True} if self.left is not None else {}),
            **{name: getattr(settings, name) for name in asked},
            "dtype": self.subject.dtype_name,
        }

    def training_about(self) -> dict[str, Any]:
        """Of `about` what a training depends on: scoring may change without it."""
        return {name: value for name, value in self.about().items() if name not in ("context", "questions")}

    def _texts_of(self) -> str:
        """Which texts a task has: the Python whose library they are, or a hash of the user's file."""
        if not self.from_file:
            return f"Python {sys.version_info.major}.{sys.version_info.minor}"
        try:
            return hashlib.sha256(Path(self.settings.task).read_bytes()).hexdigest()[:16]
        except OSError as error:
            raise DocumentError(f"task file {self.settings.task!r} cannot be read: {error.strerror}") from None

    @contextmanager
    def sweep(self, model: Any, problems: Problems, *, recall: bool = True, **about: Any) -> Iterator[Sweep]:
        """Candidates on problems; what the folder holds is not asked again. `about` is what else answers depend on.

        Raises:
            OutputError: a folder of another run, or one that cannot be written.
        """
        rows = self.rows(model, problems)
        about = {**self.about(), **about, "texts": len(problems), "rows": rows}
        # Records of before that counted dense heads as 1, and are refused.
        about |= {"recall": "over heads with a set"} if recall else {}
        with Ledger(self.settings.output_dir / LEDGER, about, KEY) as ledger:
            yield Sweep(model, self.subject.tokenizer, problems, ledger, self.settings.threads, recall, rows)

    def rows(self, model: Any, problems: Problems) -> int:
        """Questions that are decoded together: as the folder's ledgers say, since other batches round otherwise."""
        for ledger in self.settings.output_dir.glob("*.jsonl"):
            if rows := held(ledger, "rows"):
                return int(rows)
        # Texts that are made are all alike.
        seen = [problems[number] for number in range(len(problems) if self.from_file else 1)]
        cores, threads = torch.get_num_threads(), self.settings.threads
        workers = workers_for(len(problems), cores=cores, threads=threads, device=model.device.type)
        tokens, most = max(len(one.tokens) for one in seen), max(one.positions(together=False) for one in seen)
        return rows_that_fit(model, tokens, most - tokens, max(len(one.asks) for one in seen), workers)

    def refuse_unanswered(self, right: int, asked: int, consequence: str) -> None:
        """Raise a SaccadeError that says what follows from it if dense attention has answered nothing."""
        if not right:
            raise SaccadeError(
                f"dense attention answers none of {asked} questions of task {self.settings.task}, so {consequence}; "
                "choose another --task"
            )

    def write_results(self, name: str, results: Mapping[str, Any]) -> dict[str, Any]:
        """Write results into the folder, with what they depend on and what made them; gives all that."""
        device = self.subject.device
        here = {"device": device_name(device), "kernels": kernels_on(device), "threads": self.settings.threads}
        shape = self.subject.shape
        here |= {"layers": shape.layers, "full_layers": [*shape.full_layers], "kv_heads": shape.kv_heads, **versions()}
        complete = {**self.about(), **results, "environment": here}
        write_json(self.settings.output_dir / name, complete)
        return complete

    @property
    def recipe_path(self) -> Path:
        return self.settings.recipe or self.settings.output_dir / NAME

    def earlier(self, shape: ModelShape) -> Recipe:
        """What is known of the model: the recipe that will be replaced, or the one beside the model, or nothing.

        Raises:
            PolicyError: a recipe that cannot be read, or another model's.
        """
        if self.recipe_path.exists():
            known = Recipe.read(self.recipe_path)
            refuse_other(f"recipe {self.recipe_path}", known.model, shape)
        else:
            known = beside(self.subject.source.location, lambda: shape) or Recipe(shape, Policy.from_spec("dense"))
        return replace(known, model=shape)

    def write_recipe(self, command: str, recipe: Recipe, found: dict[str, Any], scores: Mapping[str, Any]) -> None:
        """Write what a command has found; what earlier ones found for this model stays, each under its command's name.

        Raises an OutputError if it cannot be written; an earlier recipe is then as it was.
        """
        about = {"date": date.today().isoformat(), **self.about(), **found}
        found, scores = {**recipe.found, command: about}, {**recipe.scores, command: dict(scores)}
        replace(recipe, found=found, scores=scores, versions=versions()).write(self.recipe_path)
