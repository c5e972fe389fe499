"""`python -m claims accumulation` from end to end on a tiny random model: files, tables, interruption, bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from claims.accumulation.accumulation import Accumulation
from commands import Invoke, told

SMALL = ("--lengths", "64,96", "--sources", "reference", "--passages", "2", "--sparse-only", "1", "--batch", "2")
QUEST = ("--policy", "quest:page=4", "--kept", "0.2", "--every", "16")


def test_a_run_gives_a_table_json_and_a_picture(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "inner" / "results"
    result = invoke("accumulation", "--model", model_folder, *SMALL, *QUEST, "--output-dir", folder)
    results = told(result, folder / "results.json", folder / "accumulation.svg")
    assert set(results["environment"]) >= {"cpu", "threads", "dtype", "versions"}
    counts = {(row["length"], row["kept"], row["setting"]): row["n"] for row in results["rows"]}
    expected = {(length, None, "dense"): 64 for length in (64, 96)}
    for setting, n in (("decode-only", 64), ("every 16", 64), ("sparse-only", 32)):
        expected |= {(length, 0.2, setting): n for length in (64, 96)}
    assert counts == expected
    assert "reference: top-3 accuracy on the last 32 tokens of 1 or 2 passages" in result.stdout
    assert all(name in result.stdout for name in ("decode-only", "every 16", "sparse-only", "quest:page=4"))


def test_an_interrupted_run_is_readable(
    invoke: Invoke, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(self: Accumulation, *arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Accumulation, "_from_the_start", impatient)
    result = invoke("accumulation", "--model", model_folder, *SMALL, *QUEST, "--output-dir", tmp_path)
    results = told(result, tmp_path / "results.json", tmp_path / "accumulation.svg", interrupted=True)
    assert {row["setting"] for row in results["rows"]} == {"dense", "decode-only", "every 16"}
