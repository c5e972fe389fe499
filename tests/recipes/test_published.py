"""The papers' choices: found by a model's name, held against its sizes, and marked as nobody's measurement here."""

from dataclasses import replace

import pytest

import saccade
from methods.refusing import check_line
from saccade.checkpoints.presets import read_config
from saccade.checkpoints.shape import shape_of
from saccade.recipes.published import MARK, PUBLISHED, for_model, note, published
from saccade.recipes.resolve import resolve
from saccade.types import ModelShape

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


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("META-LLAMA/llama-3.1-8b-INSTRUCT", "llama-3.1-8b"),
        ("./models/Llama-3.1-8B-Instruct/", "llama-3.1-8b"),
        ("C:\\models\\Llama-3.1-8B", "llama-3.1-8b"),
        ("/cache/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249a16976918f6564b8830bc8", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct-GGUF", None),
        ("Llama-3.1-8B/checkpoint", None),
    ],
)
def test_a_models_name_finds_its_recipe(model: str, name: str | None) -> None:
    assert for_model(model, lambda: LLAMA_8B) == name


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


def test_an_unknown_name_asks_for_no_sizes_and_names_the_valid_ones() -> None:
    def shape() -> ModelShape:
        raise AssertionError("nobody needs them")

    assert for_model("mine", shape) is None and published("qwen3-8b") is PUBLISHED["qwen3-8b"]
    with pytest.raises(saccade.PolicyError, match=r"unknown recipe recipe:qwen3; published are llama-3-8b, .*qwen3-8b"):
        published("qwen3")


def test_two_that_fit_are_both_named() -> None:
    with pytest.raises(saccade.PolicyError) as error:
        for_model("meta-llama/Meta-Llama-3-70B-Instruct", lambda: LLAMA_70B)
    words = "recipe:llama-3-70b-10k", "at 10K tokens", "recipe:llama-3-70b-32k", "at 32K tokens"
    check_line(str(error.value), words)
