"""Files written whole or not at all, and JSON files read back exactly as they were written."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .errors import OutputError, PolicyError


def replace_text(path: str | Path, text: str, what: str = "") -> None:
    """Write `text` beside the file, in full and to the disk, and put it in the file's place.

    Args:
        what: the kind of file, for messages.

    Raises:
        OutputError: if it cannot be written; the file is as it was and nothing is left beside it.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
    except OSError as error:
        name = f"{what} {str(path)!r}".lstrip()
        raise OutputError(f"{name} cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the parts of one file; everything it refuses starts with where it stands, such as `role file PATH`."""

    where: str

    def refuse(self, what: str) -> NoReturn:
        raise PolicyError(f"{self.where}: {what}")

    def text(self, path: str | Path) -> str:
        """What a file holds.

        Raises:
            PolicyError: if it cannot be read.
        """
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError: not UTF-8, or a name no file can have
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise PolicyError(f"{self.where} cannot be read: {reason}") from None

    def parse(self, text: str) -> Any:
        try:
            return json.loads(
                text, parse_constant=self._constant, parse_float=self._float, object_pairs_hook=self._object
            )
        except PolicyError:
            raise
        except (ValueError, RecursionError) as error:
            self.refuse(f"not JSON: {error}")

    def keys(self, data: Any, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
        """`data` as an object with exactly these keys."""
        prefix = f"{name}." if name else ""
        if not isinstance(data, dict):
            self.refuse(f"{name or 'the file'} is not an object; its keys are {', '.join(keys)}")
        for key in data:
            if key not in keys:
                self.refuse(f"unknown key {short(prefix + key)}; its keys are {', '.join(keys)}")
        for key in keys:
            if key not in data:
                self.refuse(f"key {prefix + key!r} is missing; its keys are {', '.join(keys)}")
        return data

    def version(self, value: Any, version: int) -> None:
        """Refuse every version but one."""
        if isinstance(value, bool) or value != version:
            self.refuse(f"version={short(value)} is not valid: this saccade reads version {version}")

    def mapping(self, value: Any, name: str, meaning: str) -> dict[str, Any]:
        """`value` as an object of any keys; `meaning` says of what."""
        if not isinstance(value, dict):
            self.refuse(f"{name}={short(value)} is not valid: an object that says {meaning}")
        return value

    def _constant(self, text: str) -> NoReturn:
        self.refuse(f"{text} is not valid: every number must be finite")

    def _float(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            self.refuse(f"{text} is not valid: every number must be finite")
        return value

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            names = [name for name, _ in pairs]
            self.refuse(f"key {short(next(name for name in names if names.count(name) > 1))} is given twice")
        return data


def short(value: Any) -> str:
    """A value in one short line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
