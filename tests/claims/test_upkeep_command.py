"""`python -m claims upkeep` from end to end on a tiny random model: files, tables, interruption, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from claims.upkeep.names import ALL
from claims.upkeep.upkeep import Experiment
from commands import Invoke, told

SMALL = ("--budget", "64,80", "--prompt", "100", "--tokens", "128", "--every", "64", "--queries", "2", "--texts", "2")


def test_a_run_gives_tables_json_and_a_picture(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    files = tmp_path / "upkeep.json", tmp_path / "upkeep.svg"
    result = invoke("upkeep", "--model", model_folder, *SMALL, "--json", files[0], "--picture", files[1])
    results = told(result, *files)
    assert (results["layers"], results["texts"]) == ([2, 3, 4], ["reference", "reference"])
    assert {(row["budget"], row["decoded"], row["variant"]) for row in results["rows"]} == {
        (budget, decoded, name) for budget in (64, 80) for decoded in (0, 64, 128) for name in ALL
    }
    for row in results["rows"]:
        assert row["texts"] == len(row["token_by_text"]) == 2
        assert row["attention_interval"][0] <= row["attention"] <= row["attention_interval"][1]
        assert (row["largest_cluster"] is None) == (row["variant"] in ("streaming", "quest"))
    assert all(row["attention"] == row["token"] == 0 for row in results["differences"] if row["to"] == "rebuilt")
    assert all(name in result.stdout for name in ALL)
    assert "largest difference of replanted to rebuilt, any text and length: attention recall +0.000" in result.stdout


@pytest.mark.parametrize("after", [0, 8])
def test_an_interrupted_run_is_readable(
    invoke: Invoke, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    run = Experiment.run

    def impatient(self: Experiment, advance: Any) -> None:
        told: list[str] = []

        def stop(what: str) -> None:
            told.append(what)
            if len(told) > after:
                raise KeyboardInterrupt

        run(self, stop)

    monkeypatch.setattr(Experiment, "run", impatient)
    files = tmp_path / "upkeep.json", tmp_path / "upkeep.svg"
    asked = (*SMALL, "--variants", "replanted,quest", "--json", files[0], "--picture", files[1])
    results = told(invoke("upkeep", "--model", model_folder, *asked), *files, interrupted=True)
    # Six readings, then a measurement each.
    measured = [(row["decoded"], row["variant"]) for row in results["rows"]]
    expected = [(decoded, name) for decoded in (0, 64, 128) for name in ("replanted", "quest")]
    assert measured == (expected if after else [])
