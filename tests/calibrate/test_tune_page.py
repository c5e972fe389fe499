"""What `saccade tune` leaves behind to be looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from searching import make_task, tune_settings

from commands import invoker
from saccade.calibrate.tune import Tuning
from saccade.cli import app
from saccade.cli.calibrate import run_and_show
from saccade.eval.output import read_json
from saccade.report.page import tune_page, tune_report
from saccade.report.tune import front_table, standing_table


def test_tune_ends_with_one_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And knows in its middle what it will say in the end."""
    task = make_task(folder, tmp_path / "mine.jsonl", texts=4)
    out = tmp_path / "out"
    settings = tune_settings(folder, out, quality=0.1, task=str(task), policies=("streaming",), context=150)
    search = Tuning.check(settings)
    assert search.standing.rows() == []
    run_and_show(search, front_table, tune_report, lambda: standing_table(search.standing.rows()))
    said = capsys.readouterr().out
    assert f"report: {out / 'report.html'}\n" in said
    assert {path.suffix for path in out.rglob("*.*")} == {".html", ".json", ".jsonl"}
    results = read_json(out / "tune.json")
    assert tune_page(results) == (out / "report.html").read_text()
    at_last = [(row["family"], row["spec"], row["n"], row["ratio"]) for row in results["rows"]]
    assert at_last == [(row["family"], row["spec"], row["n"], row["ratio"]) for row in search.standing.rows()]
    assert invoker(app)("report", out).stdout.splitlines()[:-1] == said.splitlines()[:-2]
