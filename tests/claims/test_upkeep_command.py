"""`python -m claims upkeep` from end to end on a tiny random model: files, tables, interruption, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from claims.upkeep.names import ALL
from claims.upkeep.upkeep import Experiment
from commands import Fails, Invoke

SMALL = ("--budget", "64,80", "--prompt", "100", "--tokens", "128", "--every", "64", "--queries", "2", "--texts", "2")


def test_a_run_gives_tables_json_and_a_picture(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "upkeep.json", "--picture", tmp_path / "upkeep.svg")
    result = invoke("upkeep", "--model", model_folder, *SMALL, *files)
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "upkeep.json").read_text())
    assert results["complete"] is True
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
    assert ElementTree.fromstring((tmp_path / "upkeep.svg").read_text()).tag.endswith("svg")


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
    files = ("--json", tmp_path / "upkeep.json", "--picture", tmp_path / "upkeep.svg")
    result = invoke("upkeep", "--model", model_folder, *SMALL, *files, "--variants", "replanted,quest")
    assert result.exit_code == 130
    results = json.loads((tmp_path / "upkeep.json").read_text())
    assert results["complete"] is False
    # Six readings, then a measurement each.
    measured = [(row["decoded"], row["variant"]) for row in results["rows"]]
    expected = [(decoded, name) for decoded in (0, 64, 128) for name in ("replanted", "quest")]
    assert measured == (expected if after else [])
    assert "interrupted" in result.stdout
    assert (tmp_path / "upkeep.svg").is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--budget", "x"), "'x'"),
        (("--budget", "40"), "the smallest is 48"),
        (("--variants", "lazy,eager"), "'eager'"),
        (("--queries", "5"), "a measurement takes 69 tokens"),
        (("--tokens", "4096"), "1600 positions"),
        (("--texts", "0"), "from 1"),
        (("--texts", "100000"), "--texts 100000"),
        (("--device", "quantum"), "'quantum'"),
        (("--json", "/proc/saccade"), "'/proc/saccade'"),
    ],
)
def test_bad_input_is_one_line_before_any_work(refused: Fails, model_folder: Path, arguments: Any, says: str) -> None:
    assert says in refused("upkeep", "--model", model_folder, *SMALL, *arguments)
