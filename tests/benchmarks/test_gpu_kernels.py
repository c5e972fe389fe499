"""`benchmarks.gpu`: `kernels`, `captured`, `gathers`, `planting` rehearsed; `kernels` finds what oracles do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import captured, gathers, kernels, planting, timing


def test_a_rehearsal_leaves_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kernels.json"
    monkeypatch.setattr(sys, "argv", ["kernels", str(file), "--smoke", "--seconds", "600"])
    monkeypatch.setattr(kernels, "interleaved", lambda timed, **_: timing.interleaved(timed, rounds=2, seconds=0))
    kernels.main()
    found = json.loads(file.read_text())
    assert found["left_out"] == []
    groups = {(row["context"], row["batch"], row["group"]) for row in found["rows"]}
    every = ("attention", "selection", "layers", "hybrid", "resa")
    assert groups == {(256, 2, name) for name in every} | {(512, 1, name) for name in (*every, "clusters")}
    clusters = next(row for row in found["rows"] if row["variant"] == "cluster search")
    assert clusters["build_seconds"] > 0 and clusters["index_bytes"] > 0


def test_a_rehearsal_of_captured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "captured.json"
    monkeypatch.setattr(sys, "argv", ["captured", str(file), "--smoke", "--seconds", "600"])
    captured.main()
    found = json.loads(file.read_text())
    assert found["left_out"] == []
    assert [(row["rows"], row["length"]) for row in found["rows"]] == [
        point for point in ((2, 16), (3, 2100), (2, 20)) for _ in range(4)
    ]


def test_a_rehearsal_of_gathers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gathers.json"
    monkeypatch.setattr(sys, "argv", ["gathers", str(file), "--smoke", "--seconds", "600"])
    gathers.main()
    found = json.loads(file.read_text())
    assert found["left_out"] == []
    assert [(row["rows"], row["length"]) for row in found["rows"]] == [(2, 16)] * 4 + [(1, 2100)] * 4


def test_a_rehearsal_of_planting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "planting.json"
    monkeypatch.setattr(sys, "argv", ["planting", str(file), "--smoke", "--seconds", "600"])
    planting.main()
    found = json.loads(file.read_text())
    assert [(size, one["slices"]) for size, one in found["slices"].items()] == [("1024", 4)]
    assert [one["rows"] for one in found["buffers"]] == [1, 2, 2]
    assert all(0 < one["median_ms"] <= one["most_ms"] for one in found["buffers"])
    assert set(found["search_ms"]) == {"1", "2"}
