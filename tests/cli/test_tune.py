"""`saccade tune` on the command line: what it says before it starts, and what it refuses."""

from __future__ import annotations

from pathlib import Path

from commands import Invoke

TUNE = ("tune", "--context", "128", "--policy", "streaming", "--budgets", "16", "--dtype", "float32")


def test_what_can_be_shown_is_said_before_it_starts(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    """A random model answers nothing, which ends the run; by then it has been said."""
    result = invoke(*TUNE, "--model", model_folder, "--quality", "0.6", "--output-dir", tmp_path / "out")
    assert result.exit_code == 2, result.output
    said = " ".join(result.stdout.split())
    assert "texts 3 questions each; that shows a ratio of accuracies of 0." in said
    assert "at best, if a candidate loses no answer (families: 1)" in said
    assert "answers none of" in result.stderr and "Traceback" not in result.output


def test_too_few_questions_are_refused_with_how_many_it_takes(
    invoke: Invoke, model_folder: Path, tmp_path: Path
) -> None:
    result = invoke(*TUNE, "--model", model_folder, "--questions", "30", "--output-dir", tmp_path / "out")
    assert result.exit_code == 2 and not result.stdout
    assert "10 texts of 3 questions cannot show a quality of 0.99" in result.stderr
    assert "at best" in result.stderr and "texts can" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_help_speaks_of_the_ratio(invoke: Invoke) -> None:
    said = " ".join(invoke("tune", "--help").stdout.replace("│", " ").split())
    assert "ratio of its accuracy to dense attention's" in said
    assert "as many as the promise needs" in said
    assert "Some texts screen all candidates." in said and "judged on other texts" in said
    assert "Ask everything of every candidate: no screen" in said
