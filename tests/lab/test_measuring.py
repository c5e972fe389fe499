"""What a measurement leaves behind, whatever ends it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer

from lab.measuring import measure
from one_line import refused
from saccade.errors import OutputError, SaccadeError

ENDS = {None: nullcontext(), RuntimeError: pytest.raises(RuntimeError), KeyboardInterrupt: pytest.raises(typer.Exit)}


class Steps:
    """Two steps, of which the second may end it."""

    units = 2

    def __init__(self, error: type[BaseException] | None = None) -> None:
        self.done, self._error = 0, error

    def run(self, advance: Callable[[str], None]) -> None:
        for _ in range(2):
            if self.done and self._error:
                raise self._error
            self.done += 1
            advance("a step")


def measured(begin: Callable[[], Steps], *files: Path) -> None:
    def draw(found: Mapping[str, Any]) -> str:
        return f"<svg>{found['done']}</svg>"

    measure(begin, lambda work: {"done": work.done}, (files[0], files[1]), lambda found: [], draw)


def fails() -> Steps:
    raise SaccadeError("the weights cannot be read")


@pytest.mark.parametrize("before", [{}, {"found.json": "of an earlier run", "found.svg": "of it"}])
def test_what_never_began_leaves_files_as_they_were(tmp_path: Path, before: dict[str, str]) -> None:
    """Among them no empty ones."""
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    with refused(SaccadeError, "the weights cannot be read"):
        measured(fails, tmp_path / "found.json", tmp_path / "found.svg")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("names", ["absent/found.json found.svg", "found.json absent/found.svg"])
def test_files_are_tried_before_anything_begins(tmp_path: Path, names: str) -> None:
    with refused(OutputError, "cannot be written: No such file or directory"):
        measured(fails, *(tmp_path / name for name in names.split()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", ENDS)
def test_what_was_measured_is_written_whatever_ends_it(tmp_path: Path, error: type[BaseException] | None) -> None:
    files, done = (tmp_path / "found.json", tmp_path / "found.svg"), 1 if error else 2
    with ENDS[error]:
        measured(lambda: Steps(error), *files)
    found = json.loads(files[0].read_text())
    assert (found["complete"], found["done"]) == (error is None, done)
    assert files[1].read_text() == f"<svg>{done}</svg>"
