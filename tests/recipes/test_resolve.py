"""From what a user writes to a policy: `auto`, files and published recipes, on model folders and loaded models."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, GPT2Config, LlamaConfig, PreTrainedModel

import saccade
from adapters import tiny
from methods.refusing import check_line
from one_line import said
from saccade import Recipe
from saccade.checkpoints import hub as files
from saccade.checkpoints.bundled import model_path
from saccade.checkpoints.load import ModelSource
from saccade.checkpoints.shape import hash_of, shape_of_model, stored_hash, widths
from saccade.plans.identity import fingerprint
from saccade.recipes.published import note, published
from saccade.recipes.resolve import Chosen, beside, default, resolve
from saccade.types import ModelShape

POLICY = saccade.policy("tidal", reselect=3, budget=8)

Saved = Callable[..., Path]


def unasked() -> ModelShape:
    raise AssertionError("the model's shape decides nothing here")


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A tiny model in a folder, with a recipe beside it if a policy is given."""

    def save(policy: saccade.Policy | None = None, name: str = "model", seed: int = 0, **options: Any) -> Path:
        folder = tmp_path / name
        model = tiny.fresh("llama", seed)
        model.save_pretrained(folder, **options)
        if policy is not None:
            Recipe(shape_of_model(model), policy).write(folder / "saccade.json")
        return folder

    return save


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


def test_auto_takes_the_recipe_beside_the_model(saved: Saved) -> None:
    with saccade.sparsify(loaded(saved(POLICY), torch.bfloat16), "auto") as run:
        assert run.policy == POLICY and run.notes == ()


def test_auto_without_a_recipe_says_where_it_looked(saved: Saved) -> None:
    model = loaded(saved())
    with pytest.raises(saccade.PolicyError) as error:
        saccade.sparsify(model, "auto")
    check_line(
        str(error.value),
        (model.name_or_path, "no saccade.json beside it", "saccade policies --recipes", "calibrate layers --mo"),
    )
    saccade.sparsify(model, POLICY).restore()
    with pytest.raises(saccade.PolicyError, match="no recipe for model without a name"):
        saccade.sparsify(tiny.llama(), "auto")


def test_a_recipe_may_lie_anywhere(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(saved(saccade.policy("quest")))
    path = tmp_path / "mine.json"
    Recipe(shape_of_model(model), POLICY).write(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for written in (path, str(path), "mine.json", "./mine.json", "~/mine.json", Path("~/mine.json")):
        with saccade.sparsify(model, written) as run:
            assert run.policy == POLICY


@pytest.mark.parametrize("beside_it", [True, False])
def test_a_recipe_of_other_weights_is_refused(saved: Saved, beside_it: bool) -> None:
    model, other = loaded(saved()), saved(POLICY, name="other", seed=1)
    path = other / "saccade.json"
    if beside_it:
        path = Path(shutil.move(path, Path(model.name_or_path) / "saccade.json"))
    before = dict(vars(model))
    with pytest.raises(saccade.PolicyError) as error:
        saccade.sparsify(model, "auto" if beside_it else path)
    own, theirs = fingerprint(shape_of_model(model)), fingerprint(Recipe.read(path).model)
    assert str(error.value) == f"recipe {path} belongs to another model: it is for {theirs}, this one is {own}"
    assert own != theirs and vars(model) == before


def test_a_published_recipe_says_what_it_is(saved: Saved) -> None:
    """The tiny model bears a published name; its sizes are put where the recipe's are."""
    one = published("llama-3.1-8b")
    model = loaded(saved(name="Llama-3.1-8B"))
    with pytest.raises(saccade.PolicyError, match="no recipe for model"):
        saccade.sparsify(model, "auto")
    with pytest.raises(saccade.PolicyError, match=r"^recipe:llama-3\.1-8b belongs to another model"):
        saccade.sparsify(model, "recipe:llama-3.1-8b")
    deep = tiny.fresh(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    with pytest.raises(saccade.PolicyError, match=r"hidden_size=4096, .* hidden_size=32, "):
        saccade.sparsify(deep, "recipe:llama-3.1-8b")
    deep.config.hidden_size, deep.config.intermediate_size = 4096, 14_336
    for name, written in (("meta-llama/Llama-3.1-8B", "auto"), ("", "recipe:llama-3.1-8b")):
        deep.name_or_path = name
        with saccade.sparsify(deep, written) as run:
            assert run.policy == one.policy and run.notes == (note("llama-3.1-8b"),)


def test_the_file_beside_the_model_comes_before_the_paper_and_specs_are_still_specs(tmp_path: Path) -> None:
    folder, one = tmp_path / "Qwen3-8B", published("qwen3-8b")
    folder.mkdir()
    assert resolve("auto", str(folder), lambda: one.model) == Chosen(one.policy, (note("qwen3-8b"),))
    Recipe(one.model, POLICY).write(folder / "saccade.json")
    assert resolve("auto", str(folder), lambda: one.model) == Chosen(POLICY)
    for spec in ("quest:budget=64", "lychee_decode:roles=roles.json", f"composed:roles={tmp_path}/a.json"):
        assert resolve(spec, "", unasked) == Chosen(saccade.Policy.from_spec(spec))
    assert resolve(POLICY, "", unasked) == Chosen(POLICY)


def test_what_stands_for_no_policy() -> None:
    refused: dict[Any, str] = {
        3: "policy=3 is neither a Policy, a spec string nor the path of a recipe",
        "absent.json": "recipe absent.json cannot be read: No such file",
        Path("absent"): "recipe absent cannot be read: No such file",
        "recipe:": "unknown recipe recipe:; published are llama-3-8b",
        "tidal.jsn": "unknown policy 'tidal.jsn'",
    }
    told = {written: said(saccade.PolicyError, resolve, written, "", unasked) for written in refused}
    assert [line for written, line in told.items() if not line.startswith(refused[written]) or "\n" in line] == []


def test_nobody_asked_for_a_policy(saved: Saved) -> None:
    with_one, without = saved(POLICY), saved(name="Llama-3.1-8B")
    source = ModelSource("", str(with_one))
    assert default(str(with_one), source.decoder) == Chosen(POLICY)
    assert default(str(without), unasked) == Chosen(saccade.policy("less_is_more"))
    assert beside(str(without), unasked) is None
    other = replace(source.decoder(), weights="0" * 16)
    with pytest.raises(saccade.PolicyError, match="belongs to another model"):
        default(str(with_one), lambda: other)


def test_a_hub_model_has_its_recipe_beside_it_if_there_is_a_network(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1" and beside("somebody/model", unasked) is None
    assert stored_hash("somebody/model") is None
    assert files.find("no hub id", "saccade.json", download=True) is None
    folder = saved(POLICY)
    asked: list[tuple[str, str, bool]] = []

    def cached(model: str, name: str, *, local_files_only: bool) -> str:
        asked.append((model, name, local_files_only))
        if not (folder / name).is_file():
            raise OSError(f"{model} does not appear to have a file named {name}")
        return str(folder / name)

    monkeypatch.setattr(files, "cached_file", cached)
    source = ModelSource.locate(folder)
    assert beside("somebody/model", source.decoder) == Recipe.read(folder / "saccade.json")
    assert asked == [("somebody/model", "saccade.json", False)]
    assert stored_hash("somebody/model") == stored_hash(str(folder))
    assert all(only for _, _, only in asked[1:]), "weights are not downloaded to be hashed"
    (folder / "saccade.json").unlink()
    assert beside("somebody/model", source.decoder) is None


@pytest.mark.parametrize(
    ("options", "dtype"), [({}, torch.bfloat16), ({"max_shard_size": "5KB"}, torch.float32)], ids=["one file", "shards"]
)
def test_files_have_the_hash_of_the_loaded_model(saved: Saved, options: dict[str, str], dtype: torch.dtype) -> None:
    folder = saved(**options)
    assert (folder / "model.safetensors.index.json").is_file() == bool(options)
    assert ModelSource.locate(folder).decoder() == shape_of_model(loaded(folder, dtype))
    assert stored_hash(str(saved(name="other", seed=1, **options))) not in (None, stored_hash(str(folder)))


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-6])
def test_a_bfloat16_model_is_the_same_in_every_dtype(scale: float) -> None:
    rows = (torch.randn(3, 4096) * scale).bfloat16()
    assert hash_of(rows) == hash_of(rows.float()) == hash_of(rows.half())
    assert hash_of(rows) == hash_of(rows.float() * (1 + 2**-12)), "rounded to bfloat16"
    assert scale < 1e-5 or hash_of(rows) != hash_of(rows * 2)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "opt"])
def test_other_families_call_their_embeddings_otherwise(tmp_path: Path, kind: str) -> None:
    sizes: dict[str, Any] = {"opt": {"word_embed_proj_dim": 32}}.get(kind, {})
    model = tiny.fresh(kind, **sizes)
    model.save_pretrained(tmp_path)
    assert stored_hash(str(tmp_path)) == shape_of_model(model).weights is not None


def test_files_that_tell_nothing(saved: Saved, tmp_path: Path) -> None:
    assert stored_hash(str(tmp_path)) is None
    folder = saved()
    (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    assert stored_hash(str(folder)) is None
    (folder / "model.safetensors").write_bytes(b"torn")
    assert stored_hash(str(folder)) is None
    (folder / "model.safetensors").unlink()
    for index in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"model.embed_tokens.weight": "gone.safetensors"}}'):
        (folder / "model.safetensors.index.json").write_text(index)
        assert stored_hash(str(folder)) is None


def test_a_configuration_may_call_its_widths_otherwise() -> None:
    """What stands under the usual name or its alias is known, as one number, and else nothing."""
    known = [widths(config()) for config in (LlamaConfig, GPT2Config, Gemma3nTextConfig)]
    assert known == [(4096, 11_008), (768, None), (2048, None)]


def test_the_bundled_recipe_is_that_of_the_bundled_weights() -> None:
    recipe = Recipe.read(model_path() / "saccade.json")
    assert recipe.model == ModelSource.locate(None).decoder() and recipe.model.weights is not None
    assert recipe.reselect is not None
