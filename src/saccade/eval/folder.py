"""The results folder: answers line by line as they come, the rest whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import OutputError
from ..files import replace_text
from .output import JsonLines, check_folder, read_lines, write_json

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

    def add_sample(self, sample: dict[str, Any]) -> None:
        """Append one answered question."""
        self._lines[SAMPLES].add(sample)

    def add_gaze(self, gaze: dict[str, Any]) -> None:
        """Append where the policy looked for one question."""
        self._lines[GAZE].add(gaze)

    def add_recall(self, recall: dict[str, Any]) -> None:
        """Append both recalls of one answer token, layer by layer."""
        self._lines[RECALL].add(recall)

    def write_results(self, results: dict[str, Any]) -> None:
        write_json(self.path / RESULTS, results, indent=2)

    def write_configuration(self, configuration: dict[str, Any]) -> None:
        write_json(self.path / CONFIGURATION, configuration, indent=2)

    def write_report(self, page: str) -> None:
        replace_text(self.path / REPORT, page)

    def samples(self) -> list[dict[str, Any]]:
        """The answered questions so far."""
        return read_lines(self.path / SAMPLES)

    def gazes(self) -> list[dict[str, Any]]:
        """Where policies looked so far."""
        return read_lines(self.path / GAZE)

    def __enter__(self) -> ResultsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        for lines in self._lines.values():
            lines.close()
