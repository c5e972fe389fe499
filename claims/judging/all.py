"""All claims on one model, as many at a time as there are cores, each on one of them."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError

from .discovery import one
from .running import Run
from .study import Study

LONGEST = ("C3b", "C7", "C4", "C9b")
"""Begun first, the longest of the bundled model's first: begun last, one would end half an hour behind the others."""

Ended = tuple[str, dict[str, Any] | str]
"""A claim's number, and its result or why there is none."""


def at_a_time(workers: int, device: str) -> int:
    """How many run side by side: 0 means one on a CUDA device, and elsewhere one a core."""
    import torch

    cuda = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    return workers or (1 if cuda else len(os.sched_getaffinity(0)))


def run_all(numbers: Iterable[str], folder: Path, model: str | None, device: str, workers: int) -> Iterator[Ended]:
    """Run claims in folders of their own, the longest first; gives each as it ends.

    A claim that cannot be run on this model does not keep the others from it.
    """
    ordered = sorted(numbers, key=lambda number: LONGEST.index(number) if number in LONGEST else len(LONGEST))
    if workers == 1:
        yield from (_run(number, folder / number, model, device) for number in ordered)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _one_thread)
    try:
        running = [pool.submit(_run, number, folder / number, model, device) for number in ordered]
        for future in as_completed(running):
            yield future.result()
    finally:
        # An interrupt reaches the others too, and ends what they have begun.
        pool.shutdown(cancel_futures=True)


def _one_thread() -> None:
    """Whatever asks for all cores gets this process's one: the others are taken."""
    import torch

    from saccade.cli.terminal import quiet_libraries

    torch.set_num_threads(1)
    quiet_libraries()


def _run(number: str, folder: Path, model: str | None, device: str) -> Ended:
    listed = one(number)
    try:
        work = Run.check(listed, Study(model, folder, device), draft=False)
        work.run(lambda _: None)
        return listed.number, work.finish()
    except SaccadeError as error:
        return listed.number, str(error)
