"""`saccade compare --task`: a benchmark's rows in kvpress's columns, from the file to the table."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from commands import Invoke
from saccade.checkpoints.load import ModelSource

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
