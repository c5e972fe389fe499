"""Recipes on the command line: where commands find them, and what they say of those of other models."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import saccade
from benchmarks.__main__ import app as benchmarks_app
from claims.__main__ import app as claims_app
from commands import Fails, Invoke, invoker, refusal
from saccade import Recipe
from saccade.bench.decode import BenchJob, BenchSettings
from saccade.checkpoints.load import ModelSource
from saccade.cli import app as saccade_app
from saccade.eval import subject
from saccade.recipes.published import MARK, PUBLISHED, note

# Policies that are recognised by the note on the layer that nobody knows.
TIDAL, LESS_IS_MORE = "note: tidal: no layer is known", "note: less_is_more: no layer is known"


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "mine", copy_function=os.link))


@pytest.fixture
def recipe(folder: Path) -> Recipe:
    return Recipe(ModelSource.locate(folder).decoder(), saccade.policy("tidal"))


def generated(invoke: Invoke, folder: Path, *more: object) -> str:
    result = invoke("generate", "Names refer to objects.", "--model", folder, "--max-new-tokens", 2, *more)
    assert result.exit_code == 0, result.output
    return result.stderr


def test_generate_takes_the_recipe_beside_the_model(invoke: Invoke, folder: Path, recipe: Recipe) -> None:
    assert LESS_IS_MORE in generated(invoke, folder)
    recipe.write(folder / "saccade.json")
    assert TIDAL in generated(invoke, folder)
    assert "note: tidal:budget=8: no layer is known" in generated(invoke, folder, "--policy", "auto", "--budget", 8)
    assert LESS_IS_MORE in generated(invoke, folder, "--policy", "less_is_more")


def test_no_recipe_is_said_in_one_line(fails: Fails, folder: Path) -> None:
    asked = ("generate", "x", "--model", folder, "--policy")
    assert f"saccade calibrate layers --model {folder}" in fails(*asked, "auto")
    assert "recipe none.json cannot be read: No such file" in fails(*asked, "none.json")


@pytest.mark.parametrize(
    ("invoke", "command", "policy"),
    [
        (invoker(saccade_app), ("generate", "x"), "auto"),
        (invoker(saccade_app), ("compare",), "recipe:qwen3-8b"),
        (invoker(claims_app), ("accumulation",), "auto"),
        (invoker(benchmarks_app), ("soak",), "auto"),
    ],
    ids=["generate", "published", "accumulation", "soak"],
)
def test_a_recipe_of_another_model_is_refused(
    fails: Fails, folder: Path, recipe: Recipe, command: tuple[str, ...], policy: str
) -> None:
    text = recipe.to_json()
    assert recipe.model.weights is not None
    (folder / "saccade.json").write_text(text.replace(recipe.model.weights, "0" * 16))
    said = fails(*command, "--model", folder, "--policy", policy)
    assert "belongs to another model" in said and f"weights={recipe.model.weights}" in said
    assert ("weights=0000000000000000" if policy == "auto" else "layers=36") in said


def test_published_recipes_are_listed_and_counted(invoke: Invoke) -> None:
    result = invoke("policies", "--recipes")
    assert result.exit_code == 0, result.output
    assert all(words in result.stdout for words in (MARK, *(f"recipe:{name}" for name in PUBLISHED)))
    for option in (["--cost"], ["--model", "qwen3-8b"]):
        assert option[0] in refusal(invoke("policies", "--recipes", *option))
    result = invoke("policies", "--cost", "--model", "qwen3-8b", "--policy", "auto")
    assert result.exit_code == 0, result.output
    assert note("qwen3-8b") in result.stdout and "reselect=12" in result.stdout


def test_a_benchmark_takes_its_shapes_recipe(folder: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are random, so that sizes decide; they are not made here, whatever room there is."""
    monkeypatch.setattr(subject, "free_memory", lambda _: None)
    text = recipe.to_json()
    assert recipe.model.weights is not None
    (folder / "saccade.json").write_text(text.replace(recipe.model.weights, "0" * 16))
    lists = {"contexts": ["64"], "batches": ["1"], "threads": ["1"], "budgets": ["32"], "baselines": ["none"]}
    one: dict[str, Any] = {"policies": ["auto"], "steps": 2, "dtype": "float32", "device": "cpu", **lists}
    made = BenchJob.check(BenchSettings(shape=str(folder), **one))
    assert list(map(str, made.policies)) == ["dense", "tidal:budget=32"]
    made = BenchJob.check(BenchSettings(shape="qwen3-8b", **one))
    assert list(map(str, made.policies)) == ["dense", "less_is_more:budget=32,reselect=12"]
    assert note("qwen3-8b") in made.notes
