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
from saccade.report.tune import front_table


def test_tune_ends_with_one_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = make_task(folder, tmp_path / "mine.jsonl", texts=4)
    out = tmp_path / "out"
    settings = tune_settings(folder, out, task=str(task), policies=("streaming",))
    run_and_show(Tuning.check(settings), front_table, tune_report)
    said = capsys.readouterr().out
    assert f"report: {out / 'report.html'}\n" in said
    assert {path.suffix for path in out.rglob("*.*")} == {".html", ".json", ".jsonl"}
    assert tune_page(read_json(out / "tune.json")) == (out / "report.html").read_text()
    assert invoker(app)("report", out).stdout.splitlines()[:-1] == said.splitlines()[:-2]
