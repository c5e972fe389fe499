"""Layers that were found and lie at hand: where they are kept, and which recipe a policy that lacks its layer takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from saccade import Policy, PolicyError, Recipe
from saccade.recipes.kept import already_found, keep, kept_at, with_layers
from saccade.recipes.recipe import method_of
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
