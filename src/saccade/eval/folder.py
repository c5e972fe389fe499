"""The results folder: answers line by line as they come, the rest whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import OutputError
from .output import JsonLines, check_folder, read_lines, write_json, write_text

SAMPLES, GAZE, RECALL = "samples.jsonl", "gaze.jsonl", "recall.jsonl"
RESULTS, CONFIGURATION, REPORT = "results.json", "config.json", "report.html"


class ResultsFolder:
    """A folder that is being written; files of an earlier run are overwritten.

    Raises:
        OutputError: at construction, if the folder cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_folder(path)
        try:
            for name in (RESULTS, CONFIGURATION, REPORT):
                # A stale result beside new answers would be taken for theirs.
                (path / name).unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"results folder {str(path)!r} cannot be written: {error.strerror}") from error
        self._lines = {name: JsonLines(path / name, "w") for name in (SAMPLES, GAZE, RECALL)}

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Append to `SAMPLES` (answered questions), `GAZE` (where policies looked) or `RECALL` (of answer tokens)."""
        self._lines[name].add(record)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What was appended so far."""
        return read_lines(self.path / name)

    def write(self, name: str, data: dict[str, Any]) -> None:
        """Write `RESULTS` or `CONFIGURATION`, whole or not at all."""
        write_json(self.path / name, data, indent=2)

    def write_report(self, page: str) -> None:
        write_text(self.path / REPORT, page)

    def __enter__(self) -> ResultsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        for lines in self._lines.values():
            lines.close()
