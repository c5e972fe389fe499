"""What the terminal shows of a long run: progress where somebody watches, its results, and nothing from libraries."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..eval.output import check_file, write_json

if TYPE_CHECKING:
    from ..bench.grid import GridJob

PLAIN_WIDTH = 140
"""Columns of a table that goes into a file or a pipe."""


def output() -> Console:
    """Standard output; wide enough for whole rows when it is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)


def quiet_libraries() -> None:
    """Keep notes and progress bars of the libraries off the screen; commands say what matters themselves."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("huggingface_hub", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Any handler keeps logging's last resort from printing every note at each attachment.
    logging.getLogger("saccade").addHandler(logging.NullHandler())


@contextmanager
def progress(units: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, if that and stdout are terminals; gives the function to call after every unit of work."""
    done = TextColumn("{task.description:<36}"), BarColumn(), MofNCompleteColumn()
    times = TimeElapsedColumn(), TimeRemainingColumn(compact=True)
    watched = sys.stderr.isatty() and sys.stdout.isatty()
    with Progress(*done, *times, console=Console(stderr=True), disable=not watched, transient=True) as bar:
        task = bar.add_task("starting", total=units)
        yield lambda what: bar.update(task, advance=1, description=what)


class Work(Protocol):
    """What runs for long, and can be read in the middle of it."""

    @property
    def units(self) -> int:
        """How often `run` calls `advance`."""

    def run(self, advance: Callable[[str], None], /) -> object:
        """Do it all."""


def say(console: Console, *lines: str) -> None:
    """Lines as they are: nothing in them is markup, and a terminal may break them anywhere."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def until_stopped(work: Work, keep: Callable[[bool], dict[str, Any]]) -> dict[str, Any]:
    """Work under a bar; whatever ends it, `keep` writes what there is, told whether that is all.

    An interrupt is not passed on, so that its results can be shown.
    """
    complete = False
    try:
        with progress(work.units) as advance:
            work.run(advance)
        complete = True
    except KeyboardInterrupt:
        pass
    finally:
        results = keep(complete)
    return results


def time_and_show(
    job: GridJob, table: Callable[[Mapping[str, Any]], Table], json: Path | None, **more: Any
) -> dict[str, Any]:
    """Run a benchmark under a bar, print its table and notes; after every setting the file holds all rows so far.

    `more` is what else the benchmark is told.
    """
    if json is not None:
        check_file(json)
    with progress(job.units) as advance:

        def on_unit(what: str, results: dict[str, Any]) -> None:
            advance(what)
            if json is not None:
                write_json(json, results)

        results = job.run(on_unit, **more)
    if json is not None:
        write_json(json, results)
    console = output()
    console.print(table(results))
    say(console, *job.notes, *results.get("notes", ()))
    return results
