"""`saccade tune` on the command line: what it says before it starts, and what it refuses."""

import re
from pathlib import Path

from commands import Invoke, refusal

TUNE = ("tune", "--context", "900", "--policy", "streaming", "--budgets", "16", "--dtype", "float32")


def test_texts_and_minutes_are_said_before_it_starts(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    fixed = (*TUNE, "--model", model_folder, "--agreement", "0.1", "--output-dir", tmp_path / "out")
    result = invoke(*fixed)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert re.match(r"18 texts, about \d+\.\d minutes: 3 choose at most 4 candidates of 1 families, 15 others ", said)
    assert "without a loss they show 0." in said and "and 0.1 is wanted" in said
    few = refusal(invoke(*fixed, "--minutes", "1e-9"))
    assert "--agreement 0.1: in --minutes 1e-09 fit 0 texts" in few
    assert re.search(r"4 texts are needed, and \d+\.\d minutes", few)


def test_too_few_texts_are_refused_with_how_many_it_takes(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("A word and another one. " * 400)
    line = refusal(invoke(*TUNE, "--model", model_folder, "--texts", text, "--output-dir", tmp_path / "out"))
    assert re.search(r"--agreement 0.95: there are \d texts, which show 0.\d+ at best; 47 texts are needed", line)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
