"""`saccade policies --cost`: the table says what the cost model says, from a configuration alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

import saccade
from commands import LAYERS, Fails, Invoke, edited
from saccade.checkpoints.load import ModelSource
from saccade.methods.policy import Policy
from saccade.plans.cost import cost_of
from saccade.types import ModelShape

SHAPE = ModelShape(layers=LAYERS, query_heads=4, kv_heads=2, head_dim=16)


@pytest.fixture
def bare(model_folder: Path, tmp_path: Path) -> Path:
    """A folder with a configuration and nothing else."""
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(model_folder / "config.json", folder)
    return folder


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSource, "weights", None)


def rows(output: str) -> dict[str, list[str]]:
    lines = (line.split() for line in output.splitlines())
    return {cells[0]: cells[1:] for cells in lines if cells and cells[-1].endswith("×")}


def test_the_table_shows_the_model_of_costs(invoke: Invoke, bare: Path, model_folder: Path) -> None:
    specs = ("dense", "tidal:budget=64,reselect=3", "quest:budget=64,rectify=8")
    options = [word for spec in specs for word in ("--policy", spec)]
    result = invoke("policies", "--cost", "--model", bare, "--context", 5000, "--batch", 3, "--dtype", "fp32", *options)
    assert result.exit_code == 0, result.output
    # Counted by a library that is not ours, from the weights as saved; the head is a matrix of its own.
    network: Any = Qwen3ForCausalLM.from_pretrained(model_folder)
    read = sum(weight.numel() for weight in network.parameters()) - network.model.embed_tokens.weight.numel()
    shown = rows(result.output)
    assert list(shown) == list(specs)
    for spec in specs:
        policy = Policy.from_spec(spec)
        sizes = {"context": 5000, "batch": 3, "kv_itemsize": 4, "weight_bytes": 4 * read}
        cost = cost_of(policy.plan(SHAPE), policy.rectify, SHAPE, **sizes)
        parts = [cost.weights, cost.kv, cost.scores, cost.index, cost.rectification]
        figures = [f"{part.total / 1e6:.3f}" if part.total else "-" for part in parts]
        assert shown[spec] == [*figures, f"{cost.total / 1e6:.3f}", f"{cost.ceiling_over_dense:.2f}×"]
    assert f"{read:,} weights" in " ".join(result.output.split()) and "MB in all" in result.output


def test_an_embedding_that_is_the_head_too_is_counted(invoke: Invoke, bare: Path) -> None:
    edited(bare / "config.json", tie_word_embeddings=True)
    read = sum(weight.numel() for weight in Qwen3ForCausalLM(Qwen3Config.from_pretrained(bare)).parameters())
    output = invoke("policies", "--cost", "--model", bare, "--policy", "dense").output
    assert f"{read:,} weights" in output and "input embedding" not in output


def test_the_default_list_is_every_policy_and_dense_comes_first(invoke: Invoke) -> None:
    result = invoke("policies", "--cost", "--model", "llama-3.1-8b", "--batch", 8)
    assert result.exit_code == 0, result.output
    shown = rows(result.output)
    assert {spec.partition(":")[0] for spec in shown} == set(saccade.policies())
    assert shown["dense"][-1] == "1.00×"
    # 7.5 billion weights of two bytes, and 17.18 GB of cache in each of 8 rows.
    assert shown["dense"][:2] == ["15.010", "137.441"]
    assert "every:4" in result.output and "stand-in" in result.output
    assert list(rows(invoke("policies", "--cost", "--policy", "quest").output)) == ["dense", "quest"]


def test_weights_have_a_dtype_of_their_own_and_dtypes_two_names(invoke: Invoke) -> None:
    asked = ("policies", "--cost", "--policy", "quest", "--model", "llama-3.2-1b")
    short, long = (rows(invoke(*asked, "--dtype", name).output) for name in ("bf16", "bfloat16"))
    assert short == long
    int4 = rows(invoke(*asked, "--weights", "int4").output)
    assert float(short["quest"][0]) == pytest.approx(4 * float(int4["quest"][0]), rel=2e-3)
    assert short["quest"][1:4] == int4["quest"][1:4]


def test_what_the_figures_assume_is_said(invoke: Invoke) -> None:
    asked = ("policies", "--cost", "--acceptance", 0.5, "--policy", "tidal:rule=top_p,top_p=0.9,rectify=16:verify")
    output = invoke(*asked).output
    for words in ("acceptance 0.5: of 16 drafts 8 ", "full buffer", "no reselect given"):
        assert words in output


def test_a_model_that_is_no_decoder(fails: Fails, bare: Path) -> None:
    (bare / "config.json").write_text('{"model_type": "t5"}')
    assert str(bare) in fails("policies", "--cost", "--model", bare)
