"""Whole calibrations and comparisons of models with layers of several kinds: only full attention is looked at."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from searching import head_settings, layer_settings, make_task, tune_settings
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import saccade
from adapters import tiny
from adapters.test_layer_kinds import FULL_LAYERS, HYBRIDS, hybrid
from learning import nothing
from saccade.calibrate.asking import Reading
from saccade.calibrate.gold import GoldObserver
from saccade.calibrate.heads import HeadSearch
from saccade.calibrate.layers import LayerSearch
from saccade.calibrate.mixture import Mixture
from saccade.calibrate.problems import Ask, Problem
from saccade.calibrate.tune import Tuning
from saccade.checkpoints.load import ModelSource
from saccade.cli import app
from saccade.eval.entry import policies_for
from saccade.methods.policy import Policy
from saccade.plans.role_file import RoleFile
from saccade.recipes.recipe import Recipe
from saccade.report.heads import head_picture, head_table
from saccade.report.layers import layer_picture, layer_table

POSITIONS = 1600
FOLDERS = [name for name in ("gemma3_text", "qwen3_next") if name in HYBRIDS]
"""Windows, recurrent layers."""
NAMES = [name for name in ("gemma2", "gemma3n_text", "llama4_text", "gpt_oss", "qwen3_next") if name in HYBRIDS]
"""A cap beside windows, layers that share, chunks, windows beside sinks, recurrent layers."""


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in a folder with the bundled model's tokenizer; windows are far shorter than any text."""
    path = tmp_path_factory.mktemp(request.param)
    tokenizer = ModelSource.locate(None).tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    hybrid(request.param, vocab_size=2048, max_position_embeddings=POSITIONS, head_dim=16, **ends).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def task(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(folder, tmp_path_factory.mktemp("task") / "mine.jsonl", texts=4, asked=1)


def decodes(folder: Path, recipe: Path) -> None:
    prompt = "Text 1 says that word 3 comes before word 4. " * 4
    asked = ("generate", prompt, "--model", folder, "--policy", recipe, "--max-new-tokens", 4, "--dtype", "float32")
    result = CliRunner().invoke(app, list(map(str, asked)))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("folder", ["gemma3_text"], indirect=True)
def test_layers_are_searched_among_those_with_full_attention(folder: Path, task: Path, tmp_path: Path) -> None:
    own = {"policy": "tidal:dense_layers=1", "budgets": "16", "passages": 1}
    search = LayerSearch.check(layer_settings(folder, tmp_path, task=str(task), **own))
    units: list[str] = []
    results = search.run(units.append)
    assert len(units) <= search.units
    # Where answers are equal, as here, the nearest to dense.
    merit = {tuple(row["reselect"]): (row["asked"]["correct"], -row["merit"]) for row in results["rows"]}
    assert set(merit) == {(), (4,), (5,)} and merit[tuple(results["chosen"])] == max(merit.values())
    assert results["dense"]["correct"] == results["dense"]["n"] == 4, "the task was made so"
    assert results["environment"]["full_layers"] == list(FULL_LAYERS)
    for row in (results["dense"], *(row["asked"] for row in results["rows"])):
        shares = row["heads_with_set_per_layer"]
        assert [layer for layer, share in enumerate(shares) if share is not None] == list(FULL_LAYERS)
    (first,) = (row["asked"] for row in results["rows"] if row["reselect"] == [4])
    assert [first["heads_with_set_per_layer"][layer] for layer in FULL_LAYERS] == [0, 0, 0, 1]
    assert layer_table(results).row_count == 3
    layer_picture(results)
    recipe = Recipe.read(tmp_path / "saccade.json")
    assert list(recipe.reselect or ()) == results["chosen"] and set(results["chosen"]) <= {4, 5}
    decodes(folder, tmp_path / "saccade.json")


def test_heads_are_found_in_layers_with_full_attention(folder: Path, task: Path, tmp_path: Path) -> None:
    own = {"methods": "direct,random", "target_heads": 4, "budgets": "16"}
    settings = head_settings(folder, tmp_path, task=str(task), **own)
    results = HeadSearch.check(settings).run(nothing)
    file = RoleFile.read(tmp_path / "roles.json")
    assert file.roles.concerned == FULL_LAYERS
    assert {role.value for role in file.roles.layers[FULL_LAYERS[0]]} == {"publish"}
    for row in results["rows"]:
        named = {int(part.partition(".")[0]) for part in row["list"].removeprefix("heads:").split("+")}
        assert named <= set(FULL_LAYERS) and FULL_LAYERS[0] in named
        assert row["roles"] != "exact" or row["heads"] == 4
    assert all(np.shape(one["values"]) == (3, 2) for one in results["found"] if one["values"] is not None)
    head_table(results)
    drawn = head_picture(results)
    assert "layer 0 head" not in drawn and "layer 3 head" not in drawn
    with saccade.sparsify(AutoModelForCausalLM.from_pretrained(folder), Policy.create("lychee_decode", {
        "roles": str(tmp_path / "roles.json"), "budget": 16
    })) as run:  # fmt: skip
        assert run.plan.roles == file.roles
    decodes(folder, tmp_path / "saccade.json")


def test_retrieval_scores_are_of_layers_with_full_attention(folder: Path, tmp_path: Path) -> None:
    search = HeadSearch.check(head_settings(folder, tmp_path, methods="score", target_heads=4))
    found = search.find(search.target.subject.load(), "score", nothing)
    assert np.shape(found.values) == (3, 2) and np.all(np.array(found.values) > 0)
    named = {int(part.partition(".")[0]) for part in found.roles["exact"].removeprefix("heads:").split("+")}
    assert FULL_LAYERS[0] in named and named <= set(FULL_LAYERS)


@pytest.mark.parametrize("folder", FOLDERS[1:], indirect=True)
def test_tune_writes_a_recipe_that_generate_runs(folder: Path, task: Path, tmp_path: Path) -> None:
    """Every family that fits; a layer is known, and how one is searched the first test shows."""
    known = Recipe(ModelSource.locate(folder).decoder(), Policy.from_spec("dense"), reselect=(5,))
    known.write(tmp_path / "saccade.json")
    settings = tune_settings(folder, tmp_path, task=str(task), policies=(), context=150, budgets="16")
    results = Tuning.check(settings).run(nothing)
    assert results["n"] in (0, len(results["texts"]["judged"])), "nobody was judged, or by questions that dense answers"
    recurrent = "linear_attention" in ModelSource.locate(folder).decoder().kinds
    assert results["rows"]
    assert any("rectify" in row["spec"] or "resa" in row["spec"] for row in results["rows"]) != recurrent
    recipe = Recipe.read(tmp_path / "saccade.json")
    assert str(recipe.policy) == (results["chosen"] or "dense")
    decodes(folder, tmp_path / "saccade.json")


def test_what_is_compared_unless_somebody_says_otherwise_can_run(folder: Path) -> None:
    """Also where a recipe knows a layer: whole layers that stand in are the first with full attention."""
    source = ModelSource.locate(folder)
    policies, notes = policies_for((), source)
    recurrent = "linear_attention" in source.decoder().kinds
    assert any(policy.rectify for policy in policies) != recurrent
    assert any(note.startswith("left out: resa") and "use rectify=none" in note for note in notes) == recurrent
    beside = folder / "saccade.json"
    Recipe(source.decoder(), Policy.from_spec("dense"), reselect=(5,)).write(beside)
    try:
        policies, _ = policies_for((), source)
    finally:
        beside.unlink()
    (lychee,) = (policy for policy in policies if policy.name == "lychee_decode")
    assert lychee.options.model_dump()["roles"] == "layers:1+4+5"
    for policy in policies:
        policy.plan(source.decoder())


@pytest.mark.parametrize("name", NAMES)
def test_the_teacher_is_stock_and_the_student_has_gradients(name: str) -> None:
    """Mixed attention behind windows, chunks and recurrent states, in float64."""
    model = hybrid(name).double().requires_grad_(False)
    tokens = tiny.prompt(36)[0]
    past, new = tokens[:28].tolist(), tokens[28:]
    mixture, places = Mixture(model, 0.3), torch.arange(8)
    text = mixture.read(past)
    held = model(torch.tensor([past]), use_cache=True).past_key_values
    expected = model(new[None], past_key_values=held).logits[0]
    whole = model(tokens[None], use_cache=False).logits
    # Some hundred sums of numbers around 1, in the order of whoever adds them; scores are float32.
    allowed = float(expected.abs().max()) * 200 * 2.0**-24
    teacher = mixture.logits(text, new, places, None)
    assert float((teacher - expected).abs().max()) <= allowed
    gates = torch.rand(3, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    # All gates open is dense; nothing of a pass reaches the next.
    assert torch.equal(mixture.logits(text, new, places, torch.ones(3, 2)), teacher)
    loss = (mixture.logits(text, new, places, gates) - teacher).square().sum()
    (slope,) = torch.autograd.grad(loss, gates)
    assert bool((slope.abs() > 0).all()) and float(loss.detach()) > 100 * allowed**2
    assert torch.equal(mixture.logits(text, new, places, None), teacher)
    mixture.close()
    assert torch.equal(model(tokens[None], use_cache=False).logits, whole)
    assert not [held for module in model.modules() for held in vars(module) if "saccade" in held]


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("gpt_oss", "qwen3_next")])
def test_the_students_slope_is_that_of_finite_differences(name: str) -> None:
    """A slope that stopped in another layer's cache would be another by its own size.

    Central differences err by the step's square, 2^-22, and by float32 logits over the step, 2^-24 * 2^11, times tens
    of sums each: a fiftieth is more than both. Gates are such that no choice of tokens turns within so short a step:
    there no slope would be.
    """
    model = hybrid(name).double().requires_grad_(False)
    tokens = tiny.prompt(36)[0]
    mixture, places = Mixture(model, 0.3), torch.arange(8)
    text = mixture.read(tokens[:28].tolist())
    gates = torch.rand(3, 2, generator=torch.Generator().manual_seed(3)).requires_grad_()
    weights = torch.randn(8, tiny.VOCABULARY, generator=torch.Generator().manual_seed(2))

    def value(at: torch.Tensor) -> torch.Tensor:
        return (mixture.logits(text, tokens[28:], places, at) * weights).sum()

    (slope,) = torch.autograd.grad(value(gates), gates)
    step = 2.0**-11
    with torch.no_grad():
        for place in range(6):
            shift = torch.zeros(3, 2)
            shift.view(-1)[place] = step
            found = float(value(gates + shift) - value(gates - shift)) / (2 * step)
            wanted = float(slope.view(-1)[place])
            assert found == pytest.approx(wanted, rel=0.02, abs=0.02 * float(slope.abs().max()))


def test_gold_mass_beside_sinks_is_less_than_all() -> None:
    """Against a softmax with one more column, from what an observer sees; layers have the model's numbers."""
    model = hybrid("gpt_oss")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(2.0)
    tokens = tuple(tiny.prompt(40)[0].tolist())
    problem = Problem(tokens, (Ask((3, 4), (5,), (0, 40)),))
    gold = GoldObserver(6, 4, tokens, first=FULL_LAYERS[0])
    wanted: dict[int, torch.Tensor] = {}

    class Watching(GoldObserver):
        def see(self, step: Any) -> None:
            keys = step.kv.k[0].double()
            scores = torch.stack([keys[:, h // 2] @ step.q[0, h].double() for h in range(4)]) * step.softmax.scale
            logits = torch.cat([scores, torch.full((4, 1), 2.0, dtype=torch.float64)], dim=1)
            wanted[step.layer] = logits.softmax(-1)[:, :40].sum(-1)

    Reading(model, problem).observe(gold, Watching(6, 4, tokens))
    assert {*wanted} == {*FULL_LAYERS} and not gold.mass[[*{*range(6)} - {*FULL_LAYERS}]].any()
    for layer in FULL_LAYERS:
        torch.testing.assert_close(gold.mass[layer], wanted[layer], rtol=0, atol=40 * 2.0**-22)
    assert min(float(masses.min()) for masses in wanted.values()) < 0.6
