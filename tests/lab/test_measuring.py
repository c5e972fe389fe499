"""What a measurement leaves behind, whatever ends it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer

from lab.measuring import measure
from one_line import refused
from saccade.errors import OutputError, SaccadeError


class Steps:
    """Two steps, of which the second may end it."""

    units = 2

    def __init__(self, error: BaseException | None = None) -> None:
        self.done, self._error = 0, error

    def run(self, advance: Callable[[str], None]) -> None:
        for _ in range(2):
            if self.done and self._error:
                raise self._error
            self.done += 1
            advance("a step")


def measured(begin: Callable[[], Steps], json_file: Path, picture: Path) -> None:
    def results(work: Steps) -> dict[str, Any]:
        return {"done": work.done}

    measure(begin, results, (json_file, picture), lambda found: [], lambda found: f"<svg>{found['done']}</svg>")


@pytest.mark.parametrize("before", [None, "of an earlier run"])
def test_what_never_began_leaves_files_as_they_were(tmp_path: Path, before: str | None) -> None:
    """Among them no empty ones."""

    def fails() -> Steps:
        raise SaccadeError("the weights cannot be read")

    files = tmp_path / "found.json", tmp_path / "found.svg"
    if before is not None:
        for file in files:
            file.write_text(before)
    with refused(SaccadeError, "the weights cannot be read"):
        measured(fails, *files)
    assert {file: file.read_text() for file in tmp_path.iterdir()} == (dict.fromkeys(files, before) if before else {})


@pytest.mark.parametrize("unwritable", [0, 1])
def test_files_are_tried_before_anything_begins(tmp_path: Path, unwritable: int) -> None:
    files = [tmp_path / "found.json", tmp_path / "found.svg"]
    files[unwritable] = tmp_path / "absent" / "file"
    begun: list[str] = []

    def begin() -> Steps:
        begun.append("begun")
        return Steps()

    with refused(OutputError, "", repr(str(files[unwritable])), "No such file or directory"):
        measured(begin, *files)
    assert begun == [] and list(tmp_path.iterdir()) == []


ENDS = {None: nullcontext(), RuntimeError: pytest.raises(RuntimeError), KeyboardInterrupt: pytest.raises(typer.Exit)}


@pytest.mark.parametrize("error", ENDS)
def test_what_was_measured_is_written_whatever_ends_it(tmp_path: Path, error: type[BaseException] | None) -> None:
    files = tmp_path / "found.json", tmp_path / "found.svg"
    with ENDS[error]:
        measured(lambda: Steps(error and error()), *files)
    done = 1 if error else 2
    assert json.loads(files[0].read_text()) == {"complete": error is None, "done": done}
    assert files[1].read_text() == f"<svg>{done}</svg>"
