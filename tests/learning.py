"""Trainings of a tiny model's gates: what they read, what interrupts them, what they have written."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from saccade.calibrate.problems import Ask, Problem
from saccade.calibrate.training import LOG, Training

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
