"""What the terminal shows beside results: progress where somebody watches, and nothing from libraries."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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
    columns = (
        TextColumn("{task.description:<36}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    watched = sys.stderr.isatty() and sys.stdout.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not watched, transient=True) as bar:
        task = bar.add_task("reading the first context", total=units)

        def advance(what: str) -> None:
            bar.update(task, advance=1, description=what)

        yield advance
