"""Halvings of a finished run: what they count, and that a run's files are read as they were written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from claims.promise.halvings import read_tables, resampled
from commands import Invoke
from saccade.errors import OutputError


def test_a_good_candidate_is_chosen_among_bad_ones() -> None:
    """200 texts of ten; one candidate loses nothing, cheaper ones are just below the wanted ratio, in every half."""
    dense = np.ones((200, 10), dtype=bool)
    bad = dense.copy()
    bad[:, 0] = np.arange(200) % 3 == 0  # a ratio of 0.933
    tables, costs = {"good": dense, "bad": bad, "worse": ~bad}, {"good": 3.0, "bad": 2.0, "worse": 1.0}
    families = {"a": ["good", "bad"], "b": ["worse"]}
    kept = resampled(families, tables, dense, costs, 0.95, splits=30, seed=1)
    assert kept.chosen == {"good": 30} and kept.splits == 30 and kept.broken == kept.below == 0
    # Half of the texts cannot show more.
    assert resampled(families, tables, dense, costs, 0.98, splits=30, seed=1).chosen == {None: 30}
    assert kept == resampled(families, tables, dense, costs, 0.95, splits=30, seed=1)


def test_broken_counts_the_other_half() -> None:
    """A candidate right on whole texts only: chosen where its good texts fall together, and then the others show it."""
    dense = np.ones((40, 60), dtype=bool)
    bad = dense.copy()
    bad[:3] = False
    # Half of 40 texts holds none of 3 bad ones with probability 20·19·18 / (40·39·38) = 0.1154.
    kept = resampled({"a": ["bad"]}, {"bad": bad}, dense, {"bad": 1.0}, 0.88, splits=200, seed=2)
    assert kept.chosen.get("bad", 0) == pytest.approx(0.1154 * 200, abs=4 * (200 * 0.1154 * 0.8846) ** 0.5)
    assert kept.broken == kept.chosen["bad"]  # 3 of 20 texts are lost on the other half
    assert kept.below == 0  # 37 of 40 is above 0.88


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """What `tune --full` leaves: 60 texts of four questions, a candidate that loses one and one that loses half."""
    answers = {"dense": [1, 1, 1, 1], "quest:budget=64": [1, 1, 1, 1], "quest:budget=16": [1, 1, 0, 0]}
    lines = [{"settings": {}}]
    lines += [{"problem": n, "spec": spec, "right": right} for n in range(60) for spec, right in answers.items()]
    lines[2]["right"] = [1, 1, 1, 0]
    (tmp_path / "answers.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    rows = [{"family": "quest", "spec": spec, "bytes": len(spec) + sum(answers[spec])} for spec in list(answers)[1:]]
    (tmp_path / "tune.json").write_text(json.dumps({"full": True, "quality": 0.9, "texts": 60, "rows": rows}))
    return tmp_path


def test_a_finished_run_is_halved(invoke: Invoke, finished: Path) -> None:
    families, tables, dense, costs, quality = read_tables(finished)
    assert families == {"quest": ["quest:budget=64", "quest:budget=16"]} and quality == 0.9
    assert (dense.sum(), tables["quest:budget=64"].sum(), tables["quest:budget=16"].sum()) == (240, 239, 120)
    assert costs == {"quest:budget=64": 19, "quest:budget=16": 17}
    result = invoke("halvings", "--results", finished, "--splits", 50)
    assert result.exit_code == 0, result.output
    assert "50 halvings of 240 questions, quality 0.9:" in result.stdout
    assert "0.0% (0.0% to" in result.stdout and "50 quest:budget=64" in result.stdout
    assert invoke("halvings", "--results", finished, "--quality", 1.5).exit_code == 2


def test_another_folder_is_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="holds no finished run"):
        read_tables(tmp_path / "absent")
    (finished / "tune.json").write_text(json.dumps({"full": False}))
    with pytest.raises(OutputError, match="saccade tune --full"):
        read_tables(finished)
