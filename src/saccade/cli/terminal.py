"""What the terminal shows of a long run: progress where somebody watches, its results, and nothing from libraries."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, RenderableType
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


class Board(Progress):
    """A bar with the time that is left and, below it, a table of what is known so far; they go when the work ends.

    Args:
        table: makes the table, at most once in `FRESH` seconds and between two units of work, never during one.
        console: where it is shown, if that is a terminal.
    """

    def __init__(self, table: Callable[[], Table] | None, console: Console, *, watched: bool) -> None:
        self._table, self._shown, self._made = table, table() if table and watched else None, monotonic()
        what = TextColumn("{task.description}", table_column=Column(width=36, no_wrap=True, overflow="ellipsis"))
        times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(compact=True)
        # Units are not alike: a reading takes longer than an answer, and one policy longer than another.
        kept: dict[str, Any] = {"refresh_per_second": 2, "speed_estimate_period": 300.0, "transient": True}
        super().__init__(what, BarColumn(), MofNCompleteColumn(), *times, console=console, disable=not watched, **kept)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, and the table."""
        yield from super().get_renderables()
        if self._shown is not None:
            yield Padding(self._shown, (1, 0, 0, 0))

    def renew(self) -> None:
        """Make the table anew, if it is old enough."""
        if self._table is not None and not self.disable and monotonic() - self._made >= FRESH:
            self._shown, self._made = self._table(), monotonic()


@contextmanager
def progress(units: int, table: Callable[[], Table] | None = None) -> Iterator[Callable[[str], None]]:
    """A board on stderr, if that and stdout are terminals; gives the function to call after every unit of work."""
    watched = sys.stderr.isatty() and sys.stdout.isatty()
    with Board(table, Console(stderr=True), watched=watched) as board:
        task = board.add_task("starting", total=units)

        def advance(what: str) -> None:
            board.renew()
            board.update(task, advance=1, description=what)

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
