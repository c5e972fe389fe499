"""Files of experiments, written whole or line by line, and lists of numbers as the command line gives them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

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


def write_json(path: Path, data: Mapping[str, Any], *, indent: int = 1) -> None:
    """Write JSON as `write_text` does."""
    write_text(path, json.dumps(data, indent=indent, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file by `text` at once, so that whoever reads it sees the old one or the new one.

    Raises:
        OutputError: if it cannot be written.
    """
    replace_text(path, text)


class JsonLines:
    """A file that grows by a record a line, each written when `add` returns, so that a broken-off run is readable.

    Raises:
        OutputError: from every method, if the file cannot be written; what was written before stays readable.
    """

    def __init__(self, path: Path, mode: Literal["a", "w"]) -> None:
        self.path = path
        try:
            self._file = path.open(mode, encoding="utf-8")
        except OSError as error:
            raise self._unwritten(error) from error

    def add(self, record: dict[str, Any]) -> None:
        """Append a record."""
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritten(error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # what a full disk did not take is still in the buffer
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> OutputError:
        return OutputError(f"{str(self.path)!r} cannot be written: {error.strerror}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


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
