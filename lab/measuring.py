"""What runs for long and is written, drawn and printed whatever ends it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import typer

from saccade.cli.group import INTERRUPTED
from saccade.cli.terminal import Work, output, say, until_stopped
from saccade.eval.output import check_file, write_json
from saccade.files import replace_text

Measurement = TypeVar("Measurement", bound=Work)
Results = Mapping[str, Any]


def notes_of(results: Results) -> Sequence[str]:
    """What the user should know."""
    return tuple(results.get("notes", ()))


def measure(
    begin: Callable[[], Measurement],
    results: Callable[[Measurement], Results],
    files: tuple[Path | None, Path | None],
    tables: Callable[[Results], Sequence[Any]],
    draw: Callable[[Results], str],
    *,
    lines: Callable[[Results], Sequence[str]] = notes_of,
    indent: int | None = 1,
) -> None:
    """Begin a measurement once its files, JSON and picture, can be written; show tables and `lines` of what it found.

    Raises:
        OutputError: a file that cannot be written.
        typer.Exit: it was interrupted.
    """
    json, picture = files
    for path in filter(None, files):
        check_file(path)
    work = begin()

    def keep(complete: bool) -> dict[str, Any]:
        found = {"complete": complete, **results(work)}
        if json is not None:
            write_json(json, found, indent=indent)
        if picture is not None:
            replace_text(picture, draw(found))
        return found

    found = until_stopped(work, keep)
    console = output()
    for table in tables(found):
        console.print(table)
    say(console, *lines(found))
    if not found["complete"]:
        say(console, "interrupted: what was measured until then is above")
        raise typer.Exit(INTERRUPTED)
