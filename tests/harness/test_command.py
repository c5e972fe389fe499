"""`python -m saccade.lm_eval`: the harness's own command line, with tasks of the user's own from a folder."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from saccade.lm_eval.__main__ import main

GENERATION = """
task: own_generation
dataset_path: json
dataset_kwargs: {data_files: %s}
test_split: train
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: bypass}]
"""
CHOICE = """
task: own_choice
dataset_path: json
dataset_kwargs: {data_files: %s}
test_split: train
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: 0
doc_to_choice: ["1", "2"]
"""

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundled: str) -> Run:
    """The command on tasks of a folder; gives its exit code."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "The code of the amber falcon is", "answer": "1"}) + "\n")
    for name, task in (("generation", GENERATION), ("choice", CHOICE)):
        (tmp_path / f"{name}.yaml").write_text(task % json.dumps(str(tmp_path / "data.jsonl")))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    # The harness's own tasks, thousands of files, are not looked through.
    monkeypatch.setattr("lm_eval.tasks.TaskManager.__init__.__defaults__", (None, None, False, None))
    stock = __import__("lm_eval.evaluator").evaluator.evaluate
    monkeypatch.setattr("lm_eval.evaluator.evaluate", stock)  # what the command changes is changed back

    def running(*arguments: str, policy: str = "tidal:budget=16,reselect=7") -> int:
        given = json.dumps({"pretrained": bundled, "policy": policy})
        command = ["saccade.lm_eval", "run", "--model_args", given, "--include_path", str(tmp_path), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return running


def test_a_generation_task_runs(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--tasks", "own_generation", "--output_path", str(tmp_path / "out"), "--log_samples") == 0
    assert "saccade ({'pretrained'" in capsys.readouterr().out
    samples = [json.loads(line) for line in next(tmp_path.glob("out/**/samples_*.jsonl")).read_text().splitlines()]
    assert len(samples) == 1
    results = json.loads(next(tmp_path.glob("out/**/results_*.json")).read_text())
    assert results["config"]["model"] == "saccade"
    assert results["config"]["model_args"]["policy"] == "tidal:budget=16,reselect=7"


def test_likelihoods_are_refused_before_anything_is_asked(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.lm_eval.model.SaccadeLM.generate_until", None)
    assert run("--tasks", "own_generation", "own_choice") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("saccade: error: own_choice: log-likelihoods never decode; ")


def test_a_policy_that_is_not_valid_is_one_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--tasks", "own_generation", policy="tidl") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("saccade: error: unknown policy 'tidl'; valid: dense, ")


def test_without_the_harness_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "saccade.lm_eval")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = 'saccade: error: saccade.lm_eval needs lm_eval: pip install ".[lm-eval]" in a checkout of saccade\n'
    assert capsys.readouterr().err == told
