"""Trainings of a tiny model's gates: what they read, what interrupts them, what they have written."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from saccade.calibrate.gates import Gates
from saccade.calibrate.problems import Ask, Problem
from saccade.calibrate.training import LOG, HeadTraining, Training
from saccade.checkpoints.shape import shape_of

ABOUT = {"model": "tiny", "task": "made up", "seed": 0}
SHORT = Training(target=2, steps=9, rate=0.3, every=1)


def made_up(seed: int, questions: int = 2) -> Problem:
    """A text of 20 tokens and questions with answers of different lengths."""
    words = torch.randint(2, 64, (200,), generator=torch.Generator().manual_seed(seed)).tolist()
    text, words = words[:20], words[20:]
    asks = []
    for number in range(questions):
        prompt, answer, words = words[: 2 + number], words[10 : 12 + number], words[20:]
        asks.append(Ask(tuple(prompt), tuple(answer), None, (7,) * number))
    return Problem(tuple(text), tuple(asks))


PROBLEMS = [made_up(seed) for seed in range(4)]


def begin(
    model: Any, folder: Path, settings: Training = SHORT, problems: Any = PROBLEMS, about: Any = ABOUT, **more: Any
) -> Any:
    """A training of direct gates, or of another `kind`, with what that is given."""
    shape = shape_of(model.config)
    own = {"kind": HeadTraining, "gates": Gates((shape.layers - 1, shape.kv_heads)), **more}
    return own.pop("kind")(model, problems, settings, folder, about, **own)


def nothing(_: str) -> None:
    pass


class StoppedError(Exception):
    """What interrupts."""


def stop_after(steps: int) -> Callable[[str], None]:
    left = [steps]

    def advance(_: str) -> None:
        left[0] -= 1
        if not left[0]:
            raise StoppedError

    return advance


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside, no file of this process can grow beyond `size` bytes: as on a full disk, writes fail in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()[1:]]
