"""The results folder: answers line by line as they come, the rest whole or not at all."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ..errors import OutputError
from ..files import replace_text

SAMPLES = "samples.jsonl"
GAZE = "gaze.jsonl"
RECALL = "recall.jsonl"
RESULTS = "results.json"
CONFIGURATION = "config.json"
REPORT = "report.html"


class ResultsFolder:
    """A folder that is being written; files of an earlier run are overwritten.

    Raises:
        OutputError: at construction, if the folder cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            for name in (RESULTS, CONFIGURATION, REPORT):
                # A stale result beside new answers would be taken for theirs; this also tries the permission.
                (path / name).unlink(missing_ok=True)
            self._samples = self._open(SAMPLES)
            self._gaze = self._open(GAZE)
            self._recall = self._open(RECALL)
        except OSError as error:
            raise OutputError(f"results folder {str(path)!r} cannot be written: {error.strerror}") from error

    @staticmethod
    def check(path: Path) -> None:
        """Make the folder and try whether it can be written; nothing in it is touched.

        Raises:
            OutputError: if it cannot.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise OutputError(f"results folder {str(path)!r} cannot be written: {error.strerror}") from error

    def add_sample(self, sample: dict[str, Any]) -> None:
        """Append one answered question."""
        _append(self._samples, sample)

    def add_gaze(self, gaze: dict[str, Any]) -> None:
        """Append where the policy looked for one question."""
        _append(self._gaze, gaze)

    def add_recall(self, recall: dict[str, Any]) -> None:
        """Append both recalls of one answer token, layer by layer."""
        _append(self._recall, recall)

    def write_results(self, results: dict[str, Any]) -> None:
        self._write(RESULTS, json.dumps(results, indent=2, allow_nan=False) + "\n")

    def write_configuration(self, configuration: dict[str, Any]) -> None:
        self._write(CONFIGURATION, json.dumps(configuration, indent=2, allow_nan=False) + "\n")

    def write_report(self, page: str) -> None:
        self._write(REPORT, page)

    def samples(self) -> list[dict[str, Any]]:
        """The answered questions so far."""
        return _read_lines(self.path / SAMPLES)

    def gazes(self) -> list[dict[str, Any]]:
        """Where policies looked so far."""
        return _read_lines(self.path / GAZE)

    def _write(self, name: str, text: str) -> None:
        """Write a file whole or not at all.

        Raises:
            OutputError: if it cannot be written.
        """
        replace_text(self.path / name, text)

    def close(self) -> None:
        self._samples.close()
        self._gaze.close()
        self._recall.close()

    def __enter__(self) -> ResultsFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, name: str) -> TextIO:
        return (self.path / name).open("w", encoding="utf-8")


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _append(file: TextIO, record: dict[str, Any]) -> None:
    file.write(json.dumps(record, allow_nan=False) + "\n")
    # Every line reaches the file before the next question, so that an interrupted run is readable.
    file.flush()
