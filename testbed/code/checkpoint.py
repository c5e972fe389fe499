"""Checkpoints of a run, in three files of less than 16 MiB each, which is what some machines hand back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saccade.errors import SaccadeError

PARTS = ("network", "muon", "adam")


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: steps done; they say which windows come next.
        factor: what the recipe's steps are multiplied by; see `recipe.scaled`.
        seconds: of training so far, in all sittings.
        seed: of the initialisation and the windows.
    """

    step: int
    factor: float
    seconds: float
    seed: int


def write(folder: Path, progress: Progress, states: dict[str, Any]) -> None:
    """Write the states of `PARTS`, then remove what was written before."""
    stem = f"step-{progress.step:06d}"
    for part in PARTS:
        partial = folder / f"{stem}.{part}.partial"
        torch.save({"progress": vars(progress), part: states[part]}, partial)
        partial.rename(folder / f"{stem}.{part}.pt")
    for path in folder.glob("step-*"):
        if not path.name.startswith(stem):
            path.unlink()


def latest(folder: Path) -> str | None:
    """The newest step, as its files' names begin, of which all parts are there."""
    stems = {path.name.split(".")[0] for path in folder.glob("step-*.pt")}
    whole = [stem for stem in stems if all((folder / f"{stem}.{part}.pt").is_file() for part in PARTS)]
    return max(whole, default=None)


def read(folder: Path, device: torch.device) -> tuple[Progress, dict[str, Any]]:
    """The newest checkpoint.

    Raises:
        SaccadeError: there is none, or its parts are of different runs.
    """
    stem = latest(folder)
    if stem is None:
        raise SaccadeError(f"--resume: {folder} holds no whole checkpoint")
    kept = {part: torch.load(folder / f"{stem}.{part}.pt", weights_only=True, map_location=device) for part in PARTS}
    told = [kept[part]["progress"] for part in PARTS]
    if told.count(told[0]) != len(told):
        raise SaccadeError(f"--resume: the parts of {folder / stem} are of different runs")
    return Progress(**told[0]), {part: kept[part][part] for part in PARTS}
