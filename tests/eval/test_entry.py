"""Policies at budgets: which rows a comparison has."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from saccade.checkpoints.bundled import model_path
from saccade.checkpoints.load import ModelSource
from saccade.errors import PolicyError, SaccadeError
from saccade.eval.entry import at_budgets, parse_budgets, policies_for, usual_policies
from saccade.methods.policy import Policy
from saccade.methods.registry import policies as known
from saccade.recipes.recipe import Recipe
from saccade.types import ModelShape

STAND_IN = "lychee_decode: whole layers stand in for its retrieval heads, which nobody has calibrated for this model"


def test_budgets_fill_in_what_was_not_given_and_what_they_do_not_reach_is_said_once() -> None:
    compared, _ = at_budgets(("tidal", "quest:budget=32", "dense", "tidal:budget=64", "tidal"), (64, 256))
    assert [str(one) for one in compared] == ["dense", "tidal:budget=64", "tidal:budget=256", "quest:budget=32"]
    _, notes = at_budgets(["dense", "dense", "tidal:budget=9", "quest"], (64,))
    assert notes == (
        "dense: --budget is ignored, this policy has none",
        "tidal:budget=9: --budget is ignored, this policy has its own",
    )


def test_a_budget_that_is_too_small_leaves_its_entry_out_unless_it_was_given_or_nothing_is_left() -> None:
    compared, notes = at_budgets(["quest", "tidal"], (8, 64))
    assert [str(one) for one in compared] == ["dense", "quest:budget=64", "tidal:budget=8", "tidal:budget=64"]
    (note,) = notes
    assert note.startswith("left out: policy quest: budget=8 ") and note.endswith("the smallest is 16")
    with pytest.raises(PolicyError, match="the smallest is 16"):
        at_budgets(["quest:budget=8", "tidal"], (64,))
    with pytest.raises(PolicyError, match=r"budget=2 .* the smallest is 5"):
        at_budgets(["streaming", "quest"], (2, 3))


SHAPE = ModelShape(layers=8, query_heads=4, kv_heads=2, head_dim=8, architecture="qwen3")


def recipe(reselect: tuple[int, ...] | None, roles: str | None) -> Recipe:
    return Recipe(SHAPE, Policy.from_spec("quest"), reselect, roles)


@pytest.mark.parametrize("found", [None, recipe((5,), "heads:0+3.1")])
def test_the_default_is_every_method(found: Recipe | None) -> None:
    compared, notes = at_budgets(usual_policies(found)[0], (16, 256))
    assert {one.name for one in compared} == {name for name, method in known().items() if method.compared}
    assert [one.name for one in compared if one.budget is None] == ["dense", "resa"]
    assert [note.partition(":")[0] for note in notes] == ["dense", "left out", "resa", "left out"]
    assert "lychee_cluster" in notes[1] and "the smallest is 48" in notes[1]
    assert "token_clusters" in notes[3] and "the smallest is 25" in notes[3]


@pytest.mark.parametrize(
    ("found", "layers", "roles"),
    [
        (None, "", "every:4"),
        (recipe((5,), None), ":reselect=5", "layers:0+2+5"),
        (recipe((6, 4), None), ":reselect=6+4", "layers:0+2+4+6"),
        (recipe((), None), ":reselect=", "layers:0+2"),
        (recipe((5,), "heads:0+3.1"), ":reselect=5", "heads:0+3.1"),
    ],
)
def test_the_default_knows_what_the_recipe_knows(found: Recipe | None, layers: str, roles: str) -> None:
    made = {policy.name: policy.to_spec() for policy in usual_policies(found)[0]}
    assert made["tidal"] == f"tidal{layers}" and made["less_is_more"] == f"less_is_more{layers}"
    assert made["lychee_decode"] == f"lychee_decode:roles={roles}"
    for spec in made.values():
        Policy.from_spec(spec).plan(SHAPE)


def test_a_method_has_its_own_layers() -> None:
    found = replace(recipe((5,), None), layers={"tidal": (6,)})
    made = {policy.name: policy.to_spec() for policy in usual_policies(found)[0]}
    assert (made["tidal"], made["less_is_more"]) == ("tidal:reselect=6", "less_is_more:reselect=5")


def test_what_is_compared_follows_the_recipe_beside_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    source = ModelSource("mine", str(shutil.copytree(model_path(), folder, copy_function=os.link)))
    (folder / "saccade.json").unlink()
    policies, notes = policies_for((), source)
    assert not {"tidal", "less_is_more"} & {policy.name for policy in policies} and notes[0] == STAND_IN
    assert "left out: tidal: no layer is known" in notes[1] and "--policy less_is_more` finds it" in notes[2]
    with pytest.raises(PolicyError, match=r"no layer is known .* or name one, reselect=LAYER"):
        policies_for(("tidal",), source)
    for roles, said in ((None, (STAND_IN,)), ("heads:0+3.1", ())):
        Recipe(source.decoder(), Policy.from_spec("quest"), (4,), roles).write(folder / "saccade.json")
        policies, notes = policies_for((), source)
        assert "tidal:reselect=4" in map(str, policies) and notes == said
        assert policies_for((), source, ("resa", "tidal")) == (
            (Policy.from_spec("resa"), Policy.from_spec("tidal:reselect=4")),
            (),
        )
    policies, (note,) = policies_for(("auto", "tidal"), source)
    assert policies == (Policy.from_spec("quest"), Policy.from_spec("tidal:reselect=4")) and "recipe beside" in note
    Recipe(replace(source.decoder(), weights="0" * 16), Policy.from_spec("quest")).write(folder / "saccade.json")
    with pytest.raises(PolicyError, match="belongs to another model"):
        policies_for((), source)
    named = Policy.from_spec("tidal:reselect=4")
    assert policies_for((str(named),), source) == ((named,), ())


def test_budgets_are_whole_numbers_read_once_each() -> None:
    assert parse_budgets(" 64,256 ,64") == (64, 256)
    for text in ("", "0", "1.5", "64,,256", "²"):
        with pytest.raises(SaccadeError, match="whole numbers"):
            parse_budgets(text)
