"""A file of results, a line each, that an interrupted job takes up again."""

import json
import os
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import OutputError
from ..eval.output import JsonLines, writing


def held(path: Path, name: str) -> Any:
    """A setting of the ledger that lies there; None if there is none."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return json.loads(path.read_text("utf-8").partition("\n")[0])["settings"][name]
    return None


class Ledger(JsonLines):
    """Records of one job by key, appended as they come; a line that was cut off by a crash is dropped.

    Args:
        settings: what the records depend on, JSON-ready; a file of other settings is refused.
        key: names of a record's fields that say which one it is.

    Raises:
        OutputError: a file that cannot be written, is not a ledger, or belongs to another job.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], key: Iterable[str]) -> None:
        self.path, self._key = path, tuple(key)
        self.records: dict[Hashable, dict[str, Any]] = {}
        head = json.dumps({"settings": settings}, sort_keys=True) + "\n"
        with writing(path):
            old = path.read_bytes() if path.exists() else b""
            kept = old[: old.rfind(b"\n") + 1]
            if kept:
                self._take_up(kept, json.loads(head)["settings"])
            if not kept:
                path.write_bytes(head.encode())
            elif kept != old:
                os.truncate(path, len(kept))
        super().__init__(path, "a")

    def _take_up(self, kept: bytes, settings: dict[str, Any]) -> None:
        try:
            first, *rest = (json.loads(line) for line in kept.decode("utf-8").splitlines())
            earlier = dict(first["settings"])
            self.records |= {self._name(record): record for record in rest}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OutputError(f"{str(self.path)!r} is not a ledger of this command: {error}") from error
        if earlier != settings:
            name = min(name for name in {*earlier, *settings} if earlier.get(name) != settings.get(name))
            raise OutputError(
                f"{str(self.path)!r} holds a run with {name}={earlier.get(name)!r}, this one has "
                f"{settings.get(name)!r}; choose another --output-dir"
            )

    def add(self, record: dict[str, Any]) -> None:
        super().add(record)
        self.records[self._name(record)] = record

    def _name(self, record: Mapping[str, Any]) -> tuple[Hashable, ...]:
        return tuple(record[field] for field in self._key)
