"""`saccade compare` on a tiny random model: files, schema, determinism, interruption, silence; a benchmark's rows."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from commands import Fails, Invoke, invoker
from saccade.adapters.hf import probe
from saccade.checkpoints.load import ModelSource
from saccade.cli import app
from saccade.eval import comparison, context
from saccade.eval.job import ComparisonJob, ComparisonSettings
from walking import walk

ROW_NAMES = {
    *("policy", "budget", "share_attended", "recall", "recall_with_dense", "recall_per_layer"),
    *("token_recall", "token_recall_with_dense", "token_recall_per_layer", "heads_with_set_per_layer"),
    *("overflow", "index_bytes", "build_seconds", "correct", "n", "ms_per_token", "speedup"),
}
SAMPLE_NAMES = {"policy", "budget", "question", "expected", "answer", "correct"}
POLICIES = ("streaming", "quest", "tidal:reselect=2", "less_is_more:reselect=2")
PER_CONTEXT = 3
QUESTIONS = 5  # two contexts

Compare = Callable[..., Any]


@pytest.fixture(scope="session")
def compare(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Compare:

    def run(*arguments: str, policies: tuple[str, ...] = POLICIES, budget: str = "32,64") -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("results") / "inner"
        specs = [part for policy in policies for part in ("--policy", policy)]
        fixed = ("--model", model_folder, "--context", 1024, "--budget", budget, "--output-dir", folder)
        # Undone after every run: other tests of this session see the real numbers.
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(context, "QUESTIONS_PER_CONTEXT", PER_CONTEXT)
            monkeypatch.setattr(comparison, "TIMED_QUESTIONS", 1)
            monkeypatch.setattr(context, "ANSWER_TOKENS", 4)
            return invoker(app)("compare", *fixed, "--limit", QUESTIONS, *specs, *arguments), folder

    return run


@pytest.fixture(scope="session")
def finished(compare: Compare) -> tuple[Any, Path]:
    result, folder = compare()
    assert result.exit_code == 0, result.output
    return result, folder


def samples_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def answers_of(folder: Path) -> dict[tuple[str, int, str], str]:
    return {(sample["spec"], sample["context"], sample["question"]): sample["answer"] for sample in samples_of(folder)}


def results_of(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def test_results_have_the_promised_names_and_tell_how_to_repeat_them(finished: tuple[Any, Path]) -> None:
    results = results_of(finished[1])
    rows, environment = results["rows"], results["environment"]
    assert results["complete"] is True and all(set(row) >= ROW_NAMES for row in rows)
    expected = [("dense", None), *((name.split(":")[0], budget) for name in POLICIES for budget in (32, 64))]
    assert [(row["policy"], row["budget"]) for row in rows] == expected
    for row in rows:
        assert row["n"] == QUESTIONS and 0 < row["share_attended"] <= 1
        dense = {"dense": 5, "streaming": 0, "quest": 2, "tidal": 3, "less_is_more": 3}[row["policy"]]
        assert sum(row["heads_with_set_per_layer"]) == 5 - dense
        for name in ("recall", "token_recall"):
            per_layer = [value for value in row[f"{name}_per_layer"] if value is not None]
            assert len(per_layer) == 5 - dense
            assert row[f"{name}_with_dense"] == pytest.approx((sum(per_layer) + dense) / 5)
            if per_layer:
                assert 0 < row[name] <= 1
                assert row[name] == pytest.approx(sum(per_layer) / len(per_layer))
        assert row["overflow"] == 0 < row["ms_per_token"]
        assert (row["index_bytes"] > 0) == (row["build_seconds"] > 0) == (row["policy"] == "quest")
        assert row["interval"][0] <= row["correct"] / row["n"] <= row["interval"][1]
    assert (rows[0]["share_attended"], rows[0]["recall_with_dense"], rows[0]["speedup"]) == (1.0, 1.0, 1.0)
    assert rows[0]["recall"] is rows[0]["token_recall"] is None
    assert set(environment) >= {"versions", "machine", "cpu", "threads", "dtype", "device", "model", "seed", "document"}
    assert set(environment["versions"]) >= {"saccade", "torch", "transformers"}
    assert len(environment["context_tokens"]) == 2 and min(environment["context_tokens"]) >= 1024
    configuration = json.loads((finished[1] / "config.json").read_text())
    assert configuration["seed"] == 0 and len(configuration["policies"]) == 9
    assert configuration["specs"] == [row["spec"] for row in rows]
    assert configuration["environment"] == environment


def test_every_question_is_a_sample_and_every_answer_token_has_its_recalls(finished: tuple[Any, Path]) -> None:
    samples = samples_of(finished[1])
    rows = results_of(finished[1])["rows"]
    assert all(set(sample) >= SAMPLE_NAMES for sample in samples)
    assert len(samples) == sum(row["n"] for row in rows) == 9 * QUESTIONS
    assert all(re.fullmatch(r"\d{4}", sample["expected"]) for sample in samples)
    # Facts at all depths are asked for, and the same ones of every policy.
    assert {round(sample["depth"] * PER_CONTEXT - 0.5) for sample in samples} == {0, 1, 2}
    assert len({(sample["context"], sample["question"]) for sample in samples}) == QUESTIONS
    lines = [json.loads(line) for line in (finished[1] / "recall.jsonl").read_text().splitlines()]
    steps: dict[tuple[Any, ...], list[int]] = {}
    for line in lines:
        assert len(line["attention_recall"]) == len(line["token_recall"]) == 5
        values = [value for name in ("attention_recall", "token_recall") for value in line[name] if value is not None]
        assert all(0 <= value <= 1 for value in values) and bool(values) == (line["policy"] != "dense")
        steps.setdefault((line["spec"], line["context"], line["question"]), []).append(line["step"])
    assert set(steps) == set(answers_of(finished[1]))
    assert all(numbers == list(range(len(numbers))) and numbers for numbers in steps.values())


def test_processes_give_the_same(compare: Compare, finished: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "workers_for", lambda *arguments, **options: 2)
    _, folder = compare(policies=("quest", "tidal:reselect=2"), budget="64")
    rows = results_of(folder)["rows"]
    specs = [row["spec"] for row in rows]
    assert len(specs) == 3
    for name in ("samples.jsonl", "recall.jsonl", "gaze.jsonl"):
        alone = [json.loads(line) for line in (finished[1] / name).read_text().splitlines()]
        shared = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        assert shared == [line for line in alone if line["spec"] in specs]
    others = {row["spec"]: row for row in results_of(finished[1])["rows"]}
    for row in rows:
        for name in row.keys() - {"ms_per_token", "speedup", "build_seconds"}:
            assert row[name] == others[row["spec"]][name], name


def test_only_the_table_is_printed_and_shown_again_from_the_folder(
    finished: tuple[Any, Path], invoke: Invoke, tmp_path: Path
) -> None:
    result, folder = finished
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert len([line for line in lines if "less_is_more:reselect=2 " in line]) == 2
    assert lines[-1] == f"report: {folder / 'report.html'}"
    assert all(len(line.rstrip()) <= 100 for line in lines[:-1])
    rule = next(number for number, line in enumerate(lines) if set(line.strip()) == {"─"})
    assert lines[rule - 1].split()[:3] == ["policy", "budget", "right"]
    for name in ("results.json", "gaze.jsonl", "samples.jsonl"):
        shutil.copy(folder / name, tmp_path)
    again = invoke("report", tmp_path)
    assert again.exit_code == 0, again.output
    assert again.stdout == result.stdout.replace(str(folder), str(tmp_path))
    assert (tmp_path / "report.html").read_text() == (folder / "report.html").read_text()


def test_notes_are_said_once_and_a_given_budget_stays(model_folder: Path, tmp_path: Path, compare: Compare) -> None:
    given = (str(model_folder), None, ("lychee_decode:roles=every:2",), "32,64", 1024, 1, tmp_path, "cpu", "auto", 0, 1)
    notes = ComparisonJob.check(ComparisonSettings(*given)).notes
    assert len([note for note in notes if "a stand-in that nobody calibrated" in note]) == 1
    result, folder = compare("--limit", "1", policies=("tidal:budget=48,reselect=3", "dense", "streaming"), budget="64")
    rows = results_of(folder)["rows"]
    assert [(row["policy"], row["budget"]) for row in rows] == [("dense", None), ("tidal", 48), ("streaming", 64)]
    assert "dense: --budget is ignored, this policy has none" in result.stdout
    assert "tidal:budget=48,reselect=3: --budget is ignored, this policy has its own" in result.stdout


def test_no_results_and_too_short_a_text_are_refused(fails: Fails, tmp_path: Path, model_folder: Path) -> None:
    neither = "holds neither results.json of `saccade compare` nor tune.json of `saccade tune`"
    assert neither in fails("report", tmp_path)
    (tmp_path / "results.json").write_text("{}")
    assert "holds no gaze.jsonl, of which its report is made" in fails("report", tmp_path)
    short = tmp_path / "short.txt"
    short.write_text("A sentence of words. " * 60, encoding="utf-8")
    told = fails("compare", "--model", model_folder, "--document", short, "--limit", 1, "--probe")
    assert re.search(r"--probe is not valid for a text of \d+ tokens: it needs 801", told)


@walk
def test_a_seed_gives_the_same_answers_in_any_order(compare: Compare, finished: tuple[Any, Path]) -> None:
    _, again = compare(policies=tuple(reversed(POLICIES)), budget="64,32")
    assert answers_of(again) == answers_of(finished[1])
    answers = {(*key[1:], answer) for key, answer in answers_of(again).items()}
    assert len(answers) > QUESTIONS, "policies that answer alike would prove nothing"
    _, other = compare("--seed", "1", policies=("tidal:reselect=2",))
    assert not {key[1:] for key in answers_of(other)} & {key[1:] for key in answers_of(finished[1])}


def test_key_tokens_stand_beside_right_answers(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "KEY", -1e9)  # a random model finds no token likelier with more before it
    result, folder = compare("--probe", policies=("quest", "less_is_more:reselect=2"), budget="32,4096")
    assert result.exit_code == 0, result.output
    dense, *rows = results_of(folder)["rows"]
    assert all(row["key_tokens"] == 2 * 2 * probe.TOLD and row["key_interval"] is None for row in (dense, *rows))
    assert dense["key_divergence"] == 0 and len(rows) == 4
    for row in rows:
        # Of log-likelihoods near -8 an ulp is 5e-7, a difference of two is off by two: once for each kind of text.
        assert row["key_divergence"] < 2e-6 if row["budget"] == 4096 else row["key_divergence"] > 1e-3, row
    assert "divergence" in result.output


def test_an_interrupted_run_is_readable(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, ended = context.Question.heard, 0

    def impatient(*given: Any) -> tuple[str, bool]:
        nonlocal ended
        if ended == PER_CONTEXT + 1:
            raise KeyboardInterrupt
        found = heard(*given)
        ended += found[1]
        return found

    monkeypatch.setattr(context.Question, "heard", impatient)
    result, folder = compare(policies=("tidal:reselect=2", "streaming"))
    assert result.exit_code == 130 and "interrupted" in result.stdout
    results = results_of(folder)
    assert results["complete"] is False
    assert [row["n"] for row in results["rows"]] == [PER_CONTEXT, 1, 0, 0, 0]
    assert results["rows"][1]["share_attended"] is not None and results["rows"][2]["ms_per_token"] is None
    assert len(samples_of(folder)) == 4
    assert "was interrupted" in (folder / "report.html").read_text()


CONTEXT = " ".join(f"The code of place {number} is {number * 7919 % 10_000}." for number in range(40))
NEW = (5, 9, 3)

Said = list[dict[str, Any]]


def row(number: int, **changed: Any) -> dict[str, Any]:
    return {
        "context": CONTEXT if number < 2 else f"Elsewhere. {CONTEXT}",
        "question": f"\nWhat is the code of place {number + 20}?",
        "answer_prefix": "It is",
        "answer": ["e", "zq"],
        "max_new_tokens": NEW[number],
        "task": "vt",
        **changed,
    }


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row(number))}\n" for number in range(3)))
    return path


@pytest.fixture
def asked(invoke: Invoke, model_folder: Path, task: Path, tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    def run(*arguments: object) -> tuple[Any, Path]:
        folder = tmp_path / "out"
        fixed = ("--model", model_folder, "--task", task, "--policy", "tidal:reselect=2", "--dtype", "float32")
        return invoke("compare", *fixed, "--budget", "24", "--output-dir", folder, *arguments), folder

    return run


def said_by_stock(model_folder: Path) -> list[tuple[str, int]]:
    """Greedy answers of transformers' own `generate` to context, question and prefix, and their length in tokens."""
    tokenizer = ModelSource.locate(model_folder).tokenizer()
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    told = []
    for number in range(3):
        one = row(number)
        parts = (one["context"], f"{one['question']}\n{one['answer_prefix']}")
        ids = [token for part in parts for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
        new = model.generate(torch.tensor([ids]), max_new_tokens=NEW[number], do_sample=False)[0, len(ids) :]
        told.append((tokenizer.decode(new, skip_special_tokens=True).strip(), len(new)))
    return told


def test_answers_are_generated_and_scored(asked: Callable[..., tuple[Any, Path]], model_folder: Path) -> None:
    result, folder = asked()
    assert result.exit_code == 0, result.output
    samples: Said = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    dense = [sample for sample in samples if sample["policy"] == "dense"]
    assert [(sample["answer"], sample["tokens"]) for sample in dense] == said_by_stock(model_folder)
    for sample in samples:
        assert sample["correct"] == sum(one in sample["answer"].lower() for one in ("e", "zq")) / 2
        assert (sample["expected"], sample["depth"], sample["fact_held"]) == ("e, zq", None, None)
    results = json.loads((folder / "results.json").read_text())
    assert results["environment"]["document"].endswith("rows.jsonl")
    for line in results["rows"]:
        own = [sample["correct"] for sample in samples if sample["spec"] == line["spec"]]
        assert (line["correct"], line["n"]) == (sum(own), 3)
        assert line["answer_tokens"] == sum(one["tokens"] for one in samples if one["spec"] == line["spec"]) / 3
        low, high = line["interval"]
        assert low <= sum(own) / 3 <= high and line["timed_tokens"] > 0
    assert "Where each policy looks" not in (folder / "report.html").read_text()
    assert results["rows"][1]["share_attended"] < 1


def test_what_is_asked_can_be_less_and_scored_otherwise(asked: Callable[..., tuple[Any, Path]]) -> None:
    result, folder = asked("--limit", "2", "--metric", "string_match_part")
    assert result.exit_code == 0, result.output
    assert "the first 2 of 3 rows of rows.jsonl; --limit asks more" in " ".join(result.stdout.split())
    samples: Said = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {sample["correct"] for sample in samples} <= {0.0, 1.0} and len(samples) == 4
