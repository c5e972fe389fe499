"""Benchmarks of `benchmarks.gpu` rehearsed; `kernels` finds what oracles do."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import kernels, layers, passes, planting, timing

SHORT = ("--seconds", "600")
Rehearsed = Callable[..., Any]


@pytest.fixture
def rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearsed:

    def run(module: Any, *options: str) -> Any:
        file = tmp_path / "found.json"
        monkeypatch.setattr(sys, "argv", [module.__name__, str(file), "--smoke", *options])
        module.main()
        return json.loads(file.read_text())

    return run


def test_a_rehearsal_leaves_nothing_out(rehearsed: Rehearsed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interleaved", lambda timed, **_: timing.interleaved(timed, rounds=2, seconds=0))
    found = rehearsed(kernels, *SHORT)
    assert found["left_out"] == []
    groups = {(row["context"], row["batch"], row["group"]) for row in found["rows"]}
    every = ("attention", "selection", "layers", "hybrid", "resa")
    assert groups == {(256, 2, name) for name in every} | {(512, 1, name) for name in (*every, "clusters")}
    clusters = next(row for row in found["rows"] if row["variant"] == "cluster search")
    assert clusters["build_seconds"] > 0 and clusters["index_bytes"] > 0


def test_a_rehearsal_of_steps(rehearsed: Rehearsed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "SHAPE", "llama-3.1-8b:4")
    found = rehearsed(layers, *SHORT)
    assert found["left_out"] == []
    points = [(2, 20), (1, 4096)]
    assert [(row["rows"], row["length"]) for row in found["rows"]] == [
        point for point in points for _ in layers.POLICIES
    ]


def test_a_rehearsal_of_planting(rehearsed: Rehearsed) -> None:
    found = rehearsed(planting, *SHORT)
    assert [(size, one["slices"]) for size, one in found["slices"].items()] == [("1024", 4)]
    assert [one["rows"] for one in found["buffers"]] == [1, 2, 2]
    assert all(0 < one["median_ms"] <= one["most_ms"] for one in found["buffers"])
    assert set(found["search_ms"]) == {"1", "2"}
    assert found["tokens"]["equal_in_every_split"] and found["tokens"]["equal_labels"] > 0.9
    assert found["tokens"]["kernels_1024"]["slices"] == found["tokens"]["torch_1024"]["slices"] == 4


def test_a_rehearsal_of_passes(rehearsed: Rehearsed) -> None:
    found = rehearsed(passes)
    assert [(one["context"], one["batch"]) for one in found["points"]] == [(512, 2), (600, 1)]
    for one in found["points"]:
        # Of float32, whose sums over 600 tokens round by no more than this.
        assert 0 < one["error"] < 600 * 2**-24 and 0 < one["sparse_error"] < 600 * 2**-24
        assert one["rectified"]["every"] == found["tokens"] - 1 == 8
        assert 0 < one["rectified"]["share"] < 1


def test_a_period_is_its_steps_and_one_pass() -> None:
    ms = {"estimation": 1, "attention": 3, "pass": 15, "bounds of a pass": 1, "torch, masked": 47}
    ms["one dense token"] = 10
    found = passes.period({name: float(one) for name, one in ms.items()}, 4)
    assert (found["ms"], found["share"], found["share_by_torch"]) == (32, 0.5, 0.75)
    assert (found["dense_ms"], found["speedup"]) == (50, 50 / 32)
