"""What answers the roles keep that gates give, as the trial's file has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy

from saccade.calibrate.heads import head_list, masks, retrieving
from saccade.calibrate.ledger import Ledger
from saccade.calibrate.sweep import KEY, Sweep
from saccade.errors import OutputError, SaccadeError
from saccade.eval.output import check_folder, read_json
from saccade.eval.subject import Subject
from saccade.methods.policy import Policy
from saccade.types import ModelShape

from ..designs.packages import PackageProblems
from .choice import Choice

LEDGER = "answers.jsonl"


@dataclass(frozen=True)
class RoleAnswers:
    """Settings that passed every check.

    Attributes:
        trial: what the file holds.
        problems: stretches of packages' sources, which share no token and were trained on by nobody.
    """

    choice: Choice
    folder: Path
    subject: Subject
    trial: Mapping[str, Any]
    problems: PackageProblems

    @classmethod
    def check(cls, file: Path, folder: Path, own: Choice, subject: Subject) -> RoleAnswers:
        """Resolve settings, or raise a SaccadeError about the first that is not valid."""
        trial = read_trial(file, subject.shape)
        check_folder(folder)
        problems = PackageProblems(
            subject.tokenizer, trial["task"], (own.context, own.context), own.texts, own.asked, own.seed,
            subject.positions, behind=own.behind,
        )  # fmt: skip
        return cls(own, folder, subject, trial, problems)

    @property
    def units(self) -> int:
        """See `Work`."""
        return len(self.problems) * len(self._specs)

    def run(self, advance: Callable[[str], None], threads: int) -> dict[str, Any]:
        """Ask; the trial, with what has come out as its `answers`."""
        about = {**self.choice.asking(), "texts": len(self.problems)}
        about |= {"weights": self.subject.shape.weights, "dtype": self.subject.dtype_name}
        with Ledger(self.folder / LEDGER, about, KEY) as ledger:
            sweep = Sweep(self.subject.load(), self.subject.tokenizer, self.problems, ledger, threads, False)
            sweep.run(self._specs, advance)
            right = {spec: [fmean(text) for text in sweep.outcome(spec).right] for spec in self._specs}
        answers = {**about, "dense": right["dense"]}
        answers["rows"] = [{**row, "right": right[row["spec"]]} for row in self._rows()]
        return {**self.trial, "answers": answers}

    @property
    def _specs(self) -> list[str]:
        return [*dict.fromkeys(("dense", *(row["spec"] for row in self._rows())))]

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Every run's roles at every budget."""
        shape = self.subject.shape
        for run in self.trial["runs"]:
            for name, mask in masks(numpy.array(run["values"]), self.trial["target"]).items():
                told = head_list(mask, shape)
                heads = retrieving(told, shape)
                for budget in self.choice.budgets:
                    spec = Policy.create("lychee_decode", {"roles": told, "budget": budget}).to_spec()
                    about = {"variant": run["variant"], "seed": run["seed"], "step": run["step"]}
                    yield {**about, "roles": name, "heads": heads, "budget": budget, "spec": spec}


def read_trial(path: Path, shape: ModelShape) -> dict[str, Any]:
    """What `python -m claims gates` has written.

    Raises:
        SaccadeError: no such file, something else, or another model's gates.
    """
    if not path.is_file():
        raise SaccadeError(f"{str(path)!r} is not there; `python -m claims gates` makes it")
    return whole_trial(read_json(path), str(path), shape)


def whole_trial(trial: dict[str, Any], name: str, shape: ModelShape) -> dict[str, Any]:
    """The same content, if it is of trained gates and of this model; errors name the file."""
    if not trial.get("runs") or "target" not in trial:
        raise OutputError(f"{name!r} holds no trained gates")
    if trial["weights"] != shape.weights:
        raise SaccadeError(f"{name!r} holds gates of {trial['model']}, another model's")
    return trial
