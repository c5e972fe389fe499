"""The results folder: its names, and answers line by line as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .output import JsonLines, writing

SAMPLES, GAZE, RECALL = "samples.jsonl", "gaze.jsonl", "recall.jsonl"
RESULTS, CONFIGURATION, REPORT = "results.json", "config.json", "report.html"


class ResultsFolder:
    """A folder that is being written; files of an earlier run are overwritten.

    Raises:
        OutputError: at construction, if the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        with writing(path, "results folder "):
            for name in (RESULTS, CONFIGURATION, REPORT):
                # A stale result beside new answers would be taken for theirs.
                (path / name).unlink(missing_ok=True)
        self._lines = {name: JsonLines(path / name, "w") for name in (SAMPLES, GAZE, RECALL)}

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Append to `SAMPLES` (answered questions), `GAZE` (where policies looked) or `RECALL` (of answer tokens)."""
        self._lines[name].add(record)

    def __enter__(self) -> ResultsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        for lines in self._lines.values():
            lines.close()
