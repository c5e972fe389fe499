"""`python -m claims promise`: what it writes and prints, and that what was published is of today's code."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from claims.promise import simulation
from claims.promise.command import error_table, power_table
from claims.promise.simulation import Grid, World, errors
from claims.stored import stored_json
from commands import Invoke


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    return stored_json("promise.json", "python -m claims promise")


def test_a_run_gives_json_and_two_tables(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Grid((8, 100), (12,), (0.9,), (0.05,), (0.3,), ("rare",), (0.0,))
    monkeypatch.setattr(
        simulation, "Grid", lambda *told, **more: replace(small, losses=Grid(*told, **more).losses) if told else small
    )
    file = tmp_path / "inner" / "promise.json"
    result = invoke("promise", "--runs", 40, "--again", 60, "--json", file, "--seed", 5)
    assert result.exit_code == 0, result.output
    results = json.loads(file.read_text())
    (row,) = results["errors"]["rows"]
    world = World(**{name: row[name] for name in World.__dataclass_fields__})
    assert (world.texts, world.asked, world.loss, row["runs"]) == (100, 12, 0.05, 40)
    assert results["errors"]["refused"] == [{"texts": 8, "asked": 12, "loss": 0.05, "needed": 46}]
    assert errors(small, 40, 60, 5)["rows"] == [row]  # by seed
    assert [one["rate"] is None for one in results["power"]] == [True, False]
    assert "1 worlds, 0 of them above 5% beyond chance" in result.stdout
    lines = [*error_table(results["errors"]), *power_table(results["power"])]
    assert all(line in result.stdout for line in lines) and "| 8 | – | 0 | 1 |" in lines


def test_published_results_are_of_today_s_bound(published: dict[str, Any]) -> None:
    """Three of their worlds, with the same draws."""
    numbered = {world: number for number, world in enumerate(Grid().worlds())}
    rows = [row for row in published["errors"]["rows"] if row["runs"] == 600]
    for row in rows[:: len(rows) // 3]:
        world = World(**{name: row[name] for name in World.__dataclass_fields__})
        rng = simulation.numpy.random.default_rng([published["seed"], numbered[world]])
        assert world.passing(1 - world.loss, 600, rng) == row["passed"]
    assert published["errors"]["exceed"] == 0
    wanted = [row for row in published["power"] if (row["texts"], row["asked"], row["correlation"]) == (100, 12, 0.1)]
    assert wanted and all(row["rate"] >= 0.8 for row in wanted)


def test_worlds_are_drawn_again_where_too_many_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counted if the others say the same; here all pass."""
    monkeypatch.setattr(World, "passing", lambda *arguments: arguments[2])
    found = errors(Grid((100,), (12,), (0.9,), (0.05,), (0.3,), ("rare",), (0.0,)), 40, 60, 0)
    assert found["exceed"] == 1 and [row["runs"] for row in found["rows"]] == [60]
