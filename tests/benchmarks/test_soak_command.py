"""`python -m benchmarks soak` from end to end on a tiny random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import Soak
from commands import Invoke, told

SMALL = ("--prompt", "80", "--tokens", "40", "--block", "10", "--window", "4")
POLICIES = ("--policy", "quest:page=4,budget=32", "--policy", "resa:page=4,min_pages=2,rectify=8")


def soaked(invoke: Invoke, model_folder: Path, folder: Path, *more: str) -> tuple[Any, Path, Path]:
    file, picture = folder / "soak.json", folder / "soak.svg"
    asked = ("soak", "--model", model_folder, *SMALL, *more, "--json", file, "--picture", picture)
    return invoke(*asked), file, picture


def test_a_run_gives_tables_json_and_a_picture(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    result, *files = soaked(invoke, model_folder, tmp_path, *POLICIES)
    results = told(result, *files)
    assert len(results["blocks"]) == 8
    assert set(results["steadiness"]) == {"quest:budget=32,page=4", "resa:page=4,min_pages=2,rectify=8"}
    assert all(name in result.stdout for name in ("ms per step", "keys and values", "Jaccard", "dense pass"))


@pytest.mark.parametrize(("left_out", "blocks", "watched"), [("--no-sets", 4, 0), ("--no-timed", 0, 1)])
def test_either_pass_can_be_left_out(
    invoke: Invoke, model_folder: Path, tmp_path: Path, left_out: str, blocks: int, watched: int
) -> None:
    result, *files = soaked(invoke, model_folder, tmp_path, *POLICIES[:2], left_out)
    results = told(result, *files)
    assert (len(results["blocks"]), len(results["steadiness"])) == (blocks, watched)


def test_an_interrupted_run_is_readable(
    invoke: Invoke, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(self: Soak, *arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Soak, "_watch", impatient)
    result, *files = soaked(invoke, model_folder, tmp_path, *POLICIES)
    assert len(told(result, *files, interrupted=True)["blocks"]) == 8
