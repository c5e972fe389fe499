"""`python -m benchmarks.gpu.tuning`, rehearsed on a tiny shape: what it writes, and that its hours are its parts'."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.walk

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("tuning") / "tuning.json"
    sizes = ["--smoke", "--context", "256", "--asked", "2", "--texts", "50", "--seconds", "600"]
    command = [sys.executable, "-m", "benchmarks.gpu.tuning", str(file), *sizes]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_machine_sizes_and_all_candidates_are_there(written: dict[str, Any]) -> None:
    assert (written["context"], written["texts_that_judge"], written["asked"], written["rows"]) == (256, 50, 2, 2)
    assert written["texts_that_screen"] == 32
    assert written["dtype"] == "float32" and written["environment"]["versions"]["torch"]
    assert len(written["families"]) == 8 and len(written["search"]["tidal"]) == 3
    rows = [*written["families"].values(), written["search"]["tidal"], [written["dense"], written["search"]["dense"]]]
    for row in (row for family in rows for row in family):
        assert row["seconds"] > 0, row
        assert row["seconds_per_token"] == pytest.approx(row["seconds"] / 26)
    assert written["extrapolated"]["unmeasured"] == []


def test_hours_are_sums_of_what_was_measured(written: dict[str, Any]) -> None:
    every = [[row["seconds"] for row in family] for family in written["families"].values()]
    reading, dense, search = written["reading"]["seconds"], written["dense"]["seconds"], written["search"]
    least = sum(reading + dense + sum(map(sum, every)) for _ in range(32))
    # Of each family the dearest rung with the one beside it; one that has a single rung stays alone.
    pairs = [max([sum(two) for two in pairwise(family)] or family) for family in every]
    most = least + 50 * (reading + dense + max(one + other for one, other in combinations(pairs, 2)))
    # 16 layers, two of them below the first that chooses.
    layers = sum(row["seconds"] for _ in range(14) for row in search["tidal"])
    searched = 8 * (reading + search["dense"]["seconds"] + layers)
    hours = written["extrapolated"]["hours"]
    assert hours == pytest.approx({"most": (most + searched) / 3600, "least": (least + searched) / 3600})
