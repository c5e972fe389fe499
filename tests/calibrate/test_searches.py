"""Whole calibrations: bad input is one line before any work; a tiny model without groups goes from text to recipe."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from searching import (
    POSITIONS,
    guessed_task,
    head_settings,
    layer_settings,
    make_model,
    make_task,
    probe_settings,
    tune_settings,
)

import saccade
from learning import StoppedError, nothing
from one_line import lacking, refused, said
from saccade.calibrate.heads import HeadSearch
from saccade.calibrate.layers import LayerSearch
from saccade.calibrate.target import Target
from saccade.calibrate.tune import Tuning
from saccade.checkpoints.load import ModelSource
from saccade.cli.calibrate import run_and_show
from saccade.errors import OutputError, SaccadeError
from saccade.plans.role_file import RoleFile
from saccade.recipes.recipe import Recipe
from saccade.report.heads import head_picture, head_table
from saccade.report.layers import layer_picture, layer_table

SEARCHES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "heads": (HeadSearch, head_settings),
    "layers": (LayerSearch, layer_settings),
    "probe": (LayerSearch, probe_settings),
    "tune": (Tuning, tune_settings),
}


@pytest.fixture(scope="module")
def task(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(folder, tmp_path_factory.mktemp("task") / "mine.jsonl", texts=4)


SEED = 4  # of models that say whole words


def begin(search: Any, file: Path) -> None:
    """A run that is stopped as soon as `file` says what it is about."""

    def stop(_: str) -> None:
        if file.exists():
            raise StoppedError

    with pytest.raises(StoppedError):
        search.run(stop)


REFUSED: dict[str, list[tuple[dict[str, Any], list[str]]]] = {
    "heads": [
        ({"task": "absent.jsonl"}, ["absent.jsonl", "cannot be read"]),
        ({"context": 10}, ["--context 10", "128"]),
        ({"target_heads": 3}, ["--target-heads 3", "4", "20"]),
        ({"target_heads": 21}, ["--target-heads 21", "4", "20"]),
        ({"methods": "direct,hardkuma"}, ["--method 'hardkuma' is not valid: direct, score, random"]),
        ({"drop_known": True}, ["--drop-known", "--task kv"]),
        # In training the questions of a text are decoded one behind another, which takes more than any one of them.
        ({"lengths": (700, 700)}, [f"the model has {POSITIONS} positions"]),
    ],
    "layers": [
        ({"device": "abacus"}, ["abacus", "cpu"]),
        ({"task": "riddles"}, ["riddles", "passkey", "FILE.jsonl"]),
        ({"context": POSITIONS}, [f"--context {POSITIONS}", str(POSITIONS)]),
        ({"policy": "quest"}, ["quest", "tidal", "less_is_more"]),
        ({"policy": "tidal:budget=64"}, ["budget"]),
        ({"policy": "tidal:dense_layers=40"}, ["dense_layers"]),
        ({"policy": "less_is_more", "budgets": "2"}, ["budget"]),
    ],
    "probe": [
        ({"context": POSITIONS + 1}, [f"--context {POSITIONS + 1}", str(POSITIONS)]),
        ({"context": 127}, ["--context 127", "128 tokens or more"]),
        ({"budgets": "185"}, ["--context 200", "740 tokens or more"]),
        ({"texts": Path("absent")}, ["absent", "No such file"]),
    ],
    "tune": [
        ({"context": 10}, ["--context 10", "128 tokens or more"]),
        ({"budgets": "16,many"}, ["many", "numbers"]),
        ({"task": "kv"}, ["--task 'kv'", "FILE.jsonl"]),
        ({"task": "absent.jsonl"}, ["absent.jsonl", "cannot be read"]),
        ({"task": "absent.jsonl", "agreement": 0.9}, ["--agreement 0.9", "--quality"]),
        ({"task": "absent.jsonl", "texts": Path("mine")}, ["--texts mine", "without --task"]),
        ({"task": "absent.jsonl", "quality": None}, ["needs a --quality", "0.99"]),
        ({"task": "absent.jsonl", "quality": 1.0}, ["--quality 1 ", "above 0 and below 1"]),
        ({"quality": 0.5}, ["--quality 0.5", "--task FILE.jsonl", "--agreement"]),
        ({"agreement": 0.0}, ["--agreement 0 ", "above 0 and below 1"]),
        ({"agreement": float("nan")}, ["--agreement nan"]),
        ({"minutes": 0.0}, ["--minutes 0", "above 0"]),
        ({"agreement": 0.99}, ["--agreement 0.99: there are 5 texts", "at best", "231 texts are needed"]),
        ({"texts": Path(__file__), "context": 740, "budgets": "185", "agreement": 0.9}, ["texts are needed"]),
        ({"policies": ("tidal:reselect=40",)}, ["40"]),
    ],
}
"""Each rule once, where the command that says it first asks for it; others stand in tests/cli/test_mistakes.py."""


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(ModelSource, "weights", lambda *_: pytest.fail("weights were read"))
    monkeypatch.chdir(tmp_path)
    search, settings = SEARCHES[name]
    assert search.check(settings(folder, tmp_path / "out")).units > 0, "or what follows is refused for another reason"

    def line(model: Path = folder, **changes: Any) -> str:
        return said(SaccadeError, lambda: search.check(settings(model, tmp_path / "out", **changes)))

    assert lacking((line(**changes), words) for changes, words in REFUSED[name]) == []
    assert list((tmp_path / "out").iterdir()) == []


def test_heads_of_a_model_without_groups(folder: Path, task: Path, tmp_path: Path) -> None:
    settings = head_settings(folder, tmp_path, methods="direct,random", task=str(task))
    search = HeadSearch.check(settings)
    units: list[str] = []
    results = search.run(units.append)
    assert len(units) <= search.units
    recipe = Recipe.read(tmp_path / "saccade.json")
    assert recipe.policy.name == "lychee_decode" and recipe.roles == results["chosen"]
    roles = RoleFile.read(tmp_path / "roles.json").roles.layers
    assert len(roles) == 5 and all(len(layer) == 4 for layer in roles)
    assert {role.value for role in roles[0]} == {"publish"}
    for row in results["rows"]:
        assert row["n"] == 8 and 0 <= row["correct"] <= 8
        assert row["roles"] != "exact" or row["heads"] == 8
    assert results["dense"]["correct"] == 8  # the task was made so
    assert json.loads((tmp_path / "heads.json").read_text()) == json.loads(json.dumps(results))
    prompt = torch.tensor([[5, 6, 7, 8] * 20])
    model = ModelSource.locate(folder).weights(torch.device("cpu"), torch.float32)
    model.generation_config.eos_token_id = None
    for found in (tmp_path / "saccade.json", str(tmp_path / "saccade.json")):
        with saccade.sparsify(model, found) as run:
            assert run.policy == recipe.policy
            assert model.generate(prompt, do_sample=False, max_new_tokens=3).shape == (1, 83)
    # What is in the folder is not done again.
    again: list[str] = []
    exact = HeadSearch.check(replace(settings, exact=True)).run(again.append)
    assert again == []
    for one, kind in ((results, "threshold"), (exact, "exact")):
        assert one["chosen_of"] == {"method": "direct", "roles": kind}
        assert one["chosen"] == one["found"][0]["roles"][kind]
    assert Recipe.read(tmp_path / "saccade.json").roles == exact["chosen"] != results["chosen"]


def test_layers_of_a_model_without_groups(folder: Path, task: Path, tmp_path: Path) -> None:
    """The chosen layers are those with most right answers, then nearest to dense; computed from the rows."""
    results = LayerSearch.check(layer_settings(folder, tmp_path, task=str(task))).run(nothing)
    merit: dict[tuple[int, ...], list[float]] = {}
    for row in results["rows"]:
        sums = merit.setdefault(tuple(row["reselect"]), [0, 0.0])
        sums[0] += row["asked"]["correct"]
        sums[1] -= row["merit"]
    assert set(merit) == {(), (3,), (4,)} and merit[tuple(results["chosen"])] == max(merit.values())


@pytest.mark.parametrize(("command", "tuned"), [("layers", True), ("heads", False), ("probe", True)])
def test_a_tuned_policy_stays(
    command: str, tuned: bool, folder: Path, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers and heads are added to what `tune` has found; what no tuning has found is replaced, as before.

    So are one method's layers to another's.
    """
    policy, scores = saccade.policy("quest", budget=16), {"dense": [6, 6], "quest:budget=16": [6, 6]}
    # A list of before, of nobody knows which method, stays for all that have none of their own.
    listed = None if tuned else (4,)
    earlier = Recipe(ModelSource.locate(folder).decoder(), policy, listed, found={"tune": {"quality": 0.5}})
    earlier = replace(earlier, scores={"tune" if tuned else "by hand": scores}, layers={"less_is_more": (4,)})
    earlier.write(tmp_path / "saccade.json")
    search, settings = SEARCHES[command]
    heads, layers = (head_table, head_picture, "heads.svg"), (layer_table, layer_picture, "layers.svg")
    shown = heads if command == "heads" else layers
    run_and_show(search.check(settings(folder, tmp_path, task=str(task), budgets="16")), *shown)
    recipe, said = Recipe.read(tmp_path / "saccade.json"), capsys.readouterr().out
    command = command.replace("probe", "layers")
    assert ("tidal" in recipe.layers, recipe.roles is None) == (command == "layers", command != "heads")
    assert recipe.reselect == (recipe.layers.get("tidal") if listed is None else listed)
    assert {name: own for name, own in recipe.layers.items() if name != "tidal"} == earlier.layers
    written = "calibrate layers --policy tidal" if command == "layers" else f"calibrate {command}"
    assert set(recipe.found) == {"tune", written}
    assert set(recipe.scores) == {*earlier.scores, written}
    if tuned:
        assert recipe.tuned and recipe.policy == policy
        assert "policy quest:budget=16, found by saccade tune" in said
    else:
        assert not recipe.tuned and recipe.policy.name == {"layers": "tidal", "heads": "lychee_decode"}[command]
        assert f"policy {recipe.policy}, not tuned" in said
    assert recipe.policy == saccade.Policy.from_spec(str(recipe.policy))


def test_answers_of_before_and_of_other_texts_are_refused(folder: Path, task: Path, tmp_path: Path) -> None:
    """Their recalls counted dense heads as 1; mixing both would compare what does not compare."""
    settings = layer_settings(folder, tmp_path, task=str(task), budgets="16", passages=1)
    ledger = tmp_path / "answers.jsonl"
    begin(LayerSearch.check(settings), ledger)
    # Texts of another seed are other texts.
    with refused(OutputError, "seed=0"):
        LayerSearch.check(replace(settings, common=replace(settings.common, seed=1))).run(nothing)
    about = json.loads(ledger.read_text().splitlines()[0])["settings"]
    assert about.pop("recall") == "over heads with a set"
    old = [{"problem": 0, "spec": "dense", "right": [1], "recall": [1.0], "token_recall": [1.0], "share": 1.0}]
    ledger.write_text("".join(json.dumps(line) + "\n" for line in ({"settings": about}, *old)))
    with pytest.raises(OutputError, match="holds a run with recall=None, this one has 'over heads with a set'"):
        LayerSearch.check(settings).run(nothing)


@pytest.mark.parametrize(("layers", "most"), [(3, 1), (4, 3)])
def test_layers_of_a_model_with_few_of_them(tmp_path: Path, layers: int, most: int) -> None:
    """With 3 no layer is left to choose beside the first selection layer; with 4 there is one, not three."""
    model = make_model(tmp_path / "model", layers=layers, seed=SEED)
    task = make_task(model, tmp_path / "mine.jsonl", texts=1)
    own = {"task": str(task), "budgets": "16", "most": most, "passages": 1}
    results = LayerSearch.check(layer_settings(model, tmp_path / "out", **own)).run(nothing)
    assert results["chosen"] in ([], [3])
    assert list(Recipe.read(tmp_path / "out" / "saccade.json").reselect) == results["chosen"]


def test_a_model_that_answers_nothing_gets_no_recipe(folder: Path, tmp_path: Path) -> None:
    line = {"context": "Word by word " * 20, "question": "What is said?", "answer": "Nothing of that"}
    texts = [json.dumps(line | {"context": f"Text {number}. {line['context']}"}) for number in range(4)]
    (tmp_path / "mine.jsonl").write_text("\n".join(texts))
    for name, task in (("layers", "kv"), ("heads", "kv"), ("tune", str(tmp_path / "mine.jsonl"))):
        search, settings = SEARCHES[name]
        with refused(SaccadeError, "answers none"):
            search.check(settings(folder, tmp_path / name, questions=1, budgets="32", task=task)).run(nothing)
        assert not (tmp_path / name / "saccade.json").exists()


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models answer nothing, and what these tests look at comes after that."""
    monkeypatch.setattr(Target, "refuse_unanswered", lambda *_: None)


@pytest.mark.usefixtures("unprobed")
def test_gates_of_another_kind_or_training_are_refused(grouped: Path, tmp_path: Path) -> None:
    """As earlier versions have left it, whose default gates were others; or stopped while training."""
    log = tmp_path / "training" / "hardkuma-0" / "steps.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text('{"settings": {"training.kind": "hardkuma", "training.scale": "letter"}}\n')
    with refused(OutputError, "is of hardkuma gates, not direct; choose another --output-dir"):
        HeadSearch.check(head_settings(grouped, tmp_path))
    assert [*tmp_path.iterdir()] == [tmp_path / "training"]
    log.write_text('{"settings": {"training.kind": "direct"}}\n')
    assert HeadSearch.check(head_settings(grouped, tmp_path)).count == 8
    log.unlink()
    begin(HeadSearch.check(head_settings(grouped, tmp_path)), tmp_path / "training" / "direct-0")
    with pytest.raises(OutputError, match="lengths"):
        HeadSearch.check(head_settings(grouped, tmp_path, lengths=(140, 160))).run(nothing)


@pytest.mark.usefixtures("unprobed")
def test_heads_by_score(folder: Path, task: Path, tmp_path: Path) -> None:
    """The score needs answers that stand in their texts, as needles do."""
    own = {"methods": "score,direct", "exact": True, "target_heads": 12, "budgets": "16"}
    settings = head_settings(folder, tmp_path / "out", **own)
    results = HeadSearch.check(settings).run(nothing)
    assert Recipe.read(tmp_path / "out" / "saccade.json").found["calibrate heads"]["method"] == "score"
    values = np.array(results["found"][0]["values"])
    assert values.shape == (4, 4) and 0 < values.max() <= 1 + 1e-6
    chosen = results["chosen"].removeprefix("heads:").split("+")
    kept = {tuple(map(int, one.split("."))) for one in chosen if "." in one}
    whole = {int(one) for one in chosen if "." not in one}
    order = sorted((-values[layer, head], layer + 1, head) for layer in range(4) for head in range(4))
    best = {(layer, head) for _, layer, head in order[:8]}
    assert {*kept, *((layer, head) for layer in whole - {0} for head in range(4))} == best and 0 in whole
    with refused(SaccadeError, "--method score"):
        HeadSearch.check(head_settings(folder, tmp_path / "other", methods="score", task=str(task))).run(nothing)


def test_random_roles_differ_by_seed(folder: Path, task: Path, tmp_path: Path) -> None:
    own = {"methods": "random", "task": str(task)}
    searches = [HeadSearch.check(head_settings(folder, tmp_path / str(seed), seed=seed, **own)) for seed in (0, 1)]
    assert len({search.find(None, "random", nothing).roles["exact"] for search in searches}) == 2


@pytest.mark.usefixtures("unprobed")
def test_questions_that_need_no_text_are_left_out(folder: Path, tmp_path: Path) -> None:
    """Of training and of scoring."""
    task = guessed_task(folder, tmp_path / "mine.jsonl")
    settings = head_settings(folder, tmp_path / "out", methods="random", task=str(task), budgets="16", drop_known=True)
    results = HeadSearch.check(settings).run(nothing)
    assert results["drop_known"] and results["texts"] == 2 and {row["n"] for row in results["rows"]} == {2}
    with pytest.raises(OutputError, match="drop_known=True, this one has None"):
        HeadSearch.check(replace(settings, drop_known=False)).run(nothing)
