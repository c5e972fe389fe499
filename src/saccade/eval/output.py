"""Files of experiments, written whole or not at all, and lists of numbers as the command line gives them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import OutputError, SaccadeError
from ..files import replace_text


def check_folder(path: Path) -> None:
    """Make a folder and try whether it can be written; nothing in it is touched.

    Raises:
        OutputError: if it cannot.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OutputError(f"results folder {str(path)!r} cannot be written: {error.strerror}") from error


def check_file(path: Path) -> None:
    """Try whether a file can be written; what it holds stays.

    Raises:
        OutputError: if it cannot.
    """
    try:
        path.open("a").close()
    except OSError as error:
        raise OutputError(f"{str(path)!r} cannot be written: {error.strerror}") from error


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON as `write_text` does."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file by `text` at once, so that whoever reads it sees the old one or the new one.

    Raises:
        OutputError: if it cannot be written.
    """
    replace_text(path, text)


def whole_numbers(option: str, text: str, *, at_least: int) -> tuple[int, ...]:
    """Read `4096,32768`; each number once, in the order given.

    Raises:
        SaccadeError: for anything that is not a list of whole numbers of at least `at_least`.
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit()) or int(part) < at_least:
            raise SaccadeError(f"{option} {part!r} is not valid: whole numbers of at least {at_least}, such as 64,256")
    return tuple(dict.fromkeys(map(int, parts)))


def shares(option: str, text: str) -> tuple[float, ...]:
    """Read `0.2,0.1`; each share once, in the order given.

    Raises:
        SaccadeError: for anything that is not a list of numbers above 0 and at most 1.
    """
    values = []
    for part in (piece.strip() for piece in text.split(",")):
        try:
            value = float(part)
        except ValueError:
            value = 0.0
        if not 0 < value <= 1:
            raise SaccadeError(f"{option} {part!r} is not valid: shares above 0 and at most 1, joined by commas")
        values.append(value)
    return tuple(dict.fromkeys(values))
