"""What the terminal shows of a long run: progress where somebody watches, its results, and nothing from libraries."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from ..eval.output import check_file, write_json

if TYPE_CHECKING:
    from ..bench.grid import GridJob

PLAIN_WIDTH = 140
"""Columns of a table that goes into a file or a pipe."""
FRESH = 1.0
"""Seconds for which a table of a long run is not made anew."""


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
def progress(units: int, table: Callable[[], Table] | None = None) -> Iterator[Callable[[str], None]]:
    """A bar with the time that is left and, below it, a table of what is known so far; they go when the work ends.

    On stderr, if that and stdout are terminals. Gives the function to call after every unit of work. The table is made
    at most once in `FRESH` seconds and between two units of work, never during one.
    """
    if not (sys.stderr.isatty() and sys.stdout.isatty()):
        yield lambda what: None
        return
    what = TextColumn("{task.description}", table_column=Column(width=36, no_wrap=True, overflow="ellipsis"))
    times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(compact=True)
    # Units are not alike: a reading takes longer than an answer, and one policy longer than another.
    bar = Progress(what, BarColumn(), MofNCompleteColumn(), *times, speed_estimate_period=300.0)
    task, shown, made = bar.add_task("starting", total=units), None if table is None else table(), monotonic()

    def advance(what: str) -> None:
        nonlocal shown, made
        if table is not None and monotonic() - made >= FRESH:
            shown, made = table(), monotonic()
        bar.update(task, advance=1, description=what)

    def board() -> RenderableType:
        return bar if shown is None else Group(bar, Padding(shown, (1, 0, 0, 0)))

    with Live(get_renderable=board, console=Console(stderr=True), refresh_per_second=2, transient=True):
        yield advance


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


def show(table: Table, *lines: str, widest: int = PLAIN_WIDTH) -> None:
    """A table of at most so many columns, and lines below it."""
    console = output()
    console.print(table, width=min(console.width, widest))
    say(console, *lines)


def until_stopped(
    work: Work, keep: Callable[[bool], dict[str, Any]], table: Callable[[], Table] | None = None
) -> dict[str, Any]:
    """Work under a bar and a table; whatever ends it, `keep` writes what there is, told whether that is all.

    An interrupt is not passed on, so that its results can be shown.
    """
    complete = False
    try:
        with progress(work.units, table) as advance:
            work.run(advance)
        complete = True
    except KeyboardInterrupt:
        pass
    finally:
        results = keep(complete)
    return results


def time_and_show(job: GridJob, table: Callable[[Mapping[str, Any]], Table], json: Path | None, **more: Any) -> None:
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
