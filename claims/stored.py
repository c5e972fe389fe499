"""Files of docs/results, read alike whether they lie there as JSON or, large ones, packed by `gzip -9n`."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def stored(name: str) -> Path:
    """Where `name`, a .json, lies: as it is, or packed."""
    plain, packed = RESULTS / name, RESULTS / f"{name}.gz"
    return packed if packed.is_file() and not plain.is_file() else plain


def stored_bytes(name: str, command: str) -> bytes:
    """The JSON as `command` wrote it.

    Raises:
        SaccadeError: it is not there, or broken.
    """
    path = stored(name)
    if not path.is_file():
        raise SaccadeError(f"{name} is not in docs/results; `{command}` makes it")
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise SaccadeError(f"{path.name} is broken ({error}); `{command}` makes it") from error


def stored_json(name: str, command: str) -> dict[str, Any]:
    """What it holds; errors of `stored_bytes`, also where that is no JSON."""
    try:
        found: dict[str, Any] = json.loads(stored_bytes(name, command))
    except ValueError as error:
        raise SaccadeError(f"{name} is broken ({error}); `{command}` makes it") from error
    return found
