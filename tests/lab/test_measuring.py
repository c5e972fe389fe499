"""What a measurement that never begins leaves behind; experiments' own tests ask what an interrupted one does."""

from pathlib import Path

import pytest

from lab.measuring import measure
from one_line import refused
from saccade.cli.terminal import Work
from saccade.errors import OutputError, SaccadeError


def fails() -> Work:
    raise SaccadeError("the weights cannot be read")


def measured(*files: Path) -> None:
    measure(fails, lambda work: {}, (files[0], files[1]), lambda found: [], lambda found: "<svg/>")


@pytest.mark.parametrize("before", [{}, {"found.json": "of an earlier run", "found.svg": "of it"}])
def test_what_never_began_leaves_files_as_they_were(tmp_path: Path, before: dict[str, str]) -> None:
    """Among them no empty ones."""
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    with refused(SaccadeError, "the weights cannot be read"):
        measured(tmp_path / "found.json", tmp_path / "found.svg")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("names", ["absent/found.json found.svg", "found.json absent/found.svg"])
def test_files_are_tried_before_anything_begins(tmp_path: Path, names: str) -> None:
    with refused(OutputError, "cannot be written: No such file or directory"):
        measured(*(tmp_path / name for name in names.split()))
    assert list(tmp_path.iterdir()) == []
