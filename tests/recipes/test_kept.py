"""Layers that lie at hand and the papers' choices: where they are found, which is taken, and how these are marked."""

from dataclasses import replace
from pathlib import Path

import pytest

import saccade
from methods.refusing import check_line
from saccade import Policy, PolicyError, Recipe
from saccade.checkpoints.presets import read_config
from saccade.checkpoints.shape import shape_of
from saccade.recipes.kept import already_found, keep, kept_at, with_layers
from saccade.recipes.published import MARK, PUBLISHED, for_model, note, published
from saccade.recipes.recipe import method_of
from saccade.recipes.resolve import resolve
from saccade.types import ModelShape

SHAPE = ModelShape(layers=8, query_heads=4, kv_heads=2, head_dim=8, architecture="qwen3", weights="9f31c2")
LESS, DENSE = Policy.from_spec("less_is_more"), Policy.from_spec("dense")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "recipes"


def test_one_layer_is_one_file_with_what_it_depends_on_in_its_name(folder: Path) -> None:
    for spec in ("", "budget=2048", "rectify=32,recent=0.25", "budget=2048,rectify=8:verify"):
        kept = kept_at(SHAPE, Policy.from_spec(f"less_is_more:{spec}"))
        assert kept == folder / "9f31c2-less_is_more-budget=2048.json"
    specs = ["less_is_more", "tidal", "tidal:budget=64", "tidal:dense_layers=1", "tidal:rule=ratio,ratio=0.1"]
    shapes = [SHAPE, replace(SHAPE, weights="0123")]
    paths = {kept_at(shape, Policy.from_spec(spec)) for spec in specs for shape in shapes}
    assert len(paths) == len(specs) * len(shapes)
    assert kept_at(replace(SHAPE, weights=None), LESS) is None


def test_beside_the_model_comes_first(tmp_path: Path, folder: Path) -> None:
    model = str(tmp_path)
    assert already_found(LESS, model, SHAPE) is None
    kept = keep(Recipe(SHAPE, DENSE, (5,)), LESS)
    assert kept == folder / "9f31c2-less_is_more-budget=2048.json"
    spec = "less_is_more:rectify=32"
    found = already_found(Policy.from_spec(spec), "", SHAPE)
    assert found == (Policy.from_spec(f"{spec},reselect=5"), f"{spec}: layers [5] of {kept} select again")
    assert already_found(Policy.from_spec("less_is_more:budget=64"), model, SHAPE) is None
    for layers, own, taken in ((None, {}, 5), ((1,), {}, 5), ((6,), {}, 6), ((3,), {"less_is_more": (6,)}, 6)):
        Recipe(SHAPE, DENSE, layers, layers=own).write(tmp_path / "saccade.json")
        found = already_found(LESS, model, SHAPE)
        assert found is not None and found[0] == Policy.from_spec(f"less_is_more:reselect={taken}")
        assert ("the recipe beside" in found[1]) == (taken == 6)


def test_layers_of_the_method_itself_come_before_another_ones(tmp_path: Path, folder: Path) -> None:
    """Wherever they lie: beside the model there may be what another method has found."""
    Recipe(SHAPE, DENSE, (6,), layers={"tidal": (6,)}).write(tmp_path / "saccade.json")
    query = Policy.from_spec("tidal:heads=query")
    for policy in (LESS, query):
        assert keep(Recipe(SHAPE, DENSE, (5,), layers={method_of(policy): (5,)}), policy) is not None
        found = already_found(policy, str(tmp_path), SHAPE)
        assert found is not None and found[0] == with_layers(policy, (5,))
    found = already_found(Policy.from_spec("tidal"), str(tmp_path), SHAPE)
    assert found is not None and "reselect=6" in str(found[0])


def test_what_does_not_fit_is_none(tmp_path: Path) -> None:
    other = replace(SHAPE, weights="0123")
    path = keep(Recipe(SHAPE, DENSE, (1,)), LESS)
    assert path is not None and already_found(LESS, "", SHAPE) is None, "layer 1 is dense"
    Recipe(other, DENSE, (5,)).write(path)
    assert already_found(LESS, "", SHAPE) is None
    path.write_text("{")
    assert already_found(LESS, "", SHAPE) is None
    Recipe(other, DENSE, (5,)).write(tmp_path / "saccade.json")
    with pytest.raises(PolicyError, match="belongs to another model"):
        already_found(LESS, str(tmp_path), SHAPE)


LLAMA_8B = ModelShape(32, 32, 8, 128, "llama", weights="9f31c2")
QWEN_8B = ModelShape(36, 32, 8, 128, "qwen3", hidden_size=4096, intermediate_size=12_288)
QWEN_4B = replace(QWEN_8B, hidden_size=2560, intermediate_size=9728)
LLAMA_70B = ModelShape(80, 64, 8, 128, "llama")

# Re-selection layers of TidalDecode (appendix A.6) and LessIsMore (table 11).
POLICIES = {
    "llama-3-8b": "less_is_more:reselect=13",
    "llama-3.1-8b": "less_is_more:reselect=13",
    "llama-3-70b-10k": "tidal:reselect=31",
    "llama-3-70b-32k": "tidal:reselect=14",
    "llama-3.2-3b": "tidal:reselect=12",
    "llama-2-7b": "tidal:reselect=7",
    "longchat-7b": "less_is_more:reselect=7",
    "qwen3-4b": "less_is_more:reselect=20",
    "qwen3-8b": "less_is_more:reselect=12",
    "qwen3-14b": "less_is_more:reselect=12",
    "deepseek-r1-distill-llama-8b": "less_is_more:reselect=12",
}


def test_the_papers_layers_are_marked() -> None:
    assert {name: str(one.policy) for name, one in PUBLISHED.items()} == POLICIES
    for name, one in PUBLISHED.items():
        assert POLICIES[name].endswith(f"reselect={'+'.join(map(str, one.reselect or ()))}")
        assert ("LessIsMore" in one.found["by"]) == POLICIES[name].startswith("less_is_more")
        assert one.found["mark"] == MARK == "from the paper, not re-measured here"
        assert note(name).endswith(MARK) and one.found["by"] in note(name)
        assert (one.model.weights, one.roles, dict(one.versions)) == (None, None, {})


def test_a_models_name_finds_its_recipe() -> None:
    names = {
        "META-LLAMA/llama-3.1-8b-INSTRUCT": "llama-3.1-8b",
        "./models/Llama-3.1-8B-Instruct/": "llama-3.1-8b",
        "C:\\models\\Llama-3.1-8B": "llama-3.1-8b",
        "/cache/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249a16976918f6564b8830bc8": "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B-Instruct-GGUF": None,
        "Llama-3.1-8B/checkpoint": None,
    }
    assert {model: for_model(model, lambda: LLAMA_8B) for model in names} == names


def test_models_of_the_same_heads_or_widths_are_told_apart() -> None:
    for name, own, other in (("Qwen3-4B", QWEN_4B, QWEN_8B), ("Qwen3-8B", QWEN_8B, QWEN_4B)):
        assert for_model(f"Qwen/{name}", lambda own=own: own) == name.lower()
        # Whatever the folder is called, the other one's layer is not for it; nor if the user names it.
        assert for_model(f"Qwen/{name}", lambda other=other: other) is None
        with pytest.raises(saccade.PolicyError, match=rf"{name.lower()} belongs to another model: .*hidden_size="):
            resolve(f"recipe:{name.lower()}", "", lambda other=other: other)
    shape = replace(LLAMA_8B, hidden_size=4096, intermediate_size=14_336)
    for name in ("Llama-3.1-8B", "DeepSeek-R1-Distill-Llama-8B"):
        assert for_model(name, lambda: shape) == name.lower()


def test_every_published_model_has_its_widths() -> None:
    """As many different ones as there are kinds of models; presets have the same."""
    assert all(one.model.hidden_size and one.model.intermediate_size for one in PUBLISHED.values())
    for preset, name in (("llama-3.1-8b", "llama-3.1-8b"), ("qwen3-8b", "qwen3-8b")):
        assert shape_of(read_config(preset)) == PUBLISHED[name].model


def test_an_unknown_name_asks_for_no_sizes_and_two_that_fit_are_both_named() -> None:
    def shape() -> ModelShape:
        raise AssertionError("nobody needs them")

    assert for_model("mine", shape) is None and published("qwen3-8b") is PUBLISHED["qwen3-8b"]
    with pytest.raises(saccade.PolicyError, match=r"unknown recipe recipe:qwen3; published are llama-3-8b, .*qwen3-8b"):
        published("qwen3")
    with pytest.raises(saccade.PolicyError) as error:
        for_model("meta-llama/Meta-Llama-3-70B-Instruct", lambda: LLAMA_70B)
    words = "recipe:llama-3-70b-10k", "at 10K tokens", "recipe:llama-3-70b-32k", "at 32K tokens"
    check_line(str(error.value), words)
