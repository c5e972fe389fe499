"""Recipes: what is written reads back; anything else is refused in one line that names the file."""

import json
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mangling
import saccade
from mangling import FREE, SHAPE
from methods.drawing import OPTIONS
from methods.refusing import check_line
from saccade import Policy, PolicyError, Recipe
from saccade.plans.identity import fingerprint, same_model
from saccade.recipes.recipe import method_of

VALID, changed = mangling.RECIPE.valid, mangling.RECIPE.changed
RECIPE = Recipe(
    SHAPE,
    saccade.policy("less_is_more", reselect=5),
    (5,),
    "heads:0+3.1",
    VALID["found"],
    VALID["scores"],
    VALID["versions"],
    {"tidal": (6,)},
)


# --- there and back -----------------------------------------------------------------------------------------------


def test_a_valid_file_is_what_it_says() -> None:
    assert Recipe.from_json(json.dumps(VALID)) == RECIPE


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    name = draw(st.sampled_from(sorted(OPTIONS)))
    given = [option for option in OPTIONS[name] if option == "roles" or draw(st.booleans())]
    policy = saccade.policy(name, **{option: draw(OPTIONS[name][option]) for option in given})
    return Recipe(
        replace(SHAPE, weights=draw(st.none() | st.text(max_size=8))),
        policy,
        draw(st.none() | st.lists(st.integers(0, 7), max_size=3).map(tuple)),
        draw(st.none() | st.sampled_from(["heads:0", "heads:0+1.1+7", "layers:0+5"])),
        draw(FREE),
        draw(FREE),
        draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)),
        draw(st.dictionaries(st.sampled_from(["tidal", "tidal:heads=query", "less_is_more"]), st.just((4, 6)))),
    )


def test_a_method_has_layers_of_its_own() -> None:
    """Whichever was looked for last; a file of earlier versions has one list for all."""
    assert [RECIPE.layers_of(name) for name in ("tidal", "less_is_more")] == [(6,), (5,)]
    earlier = Recipe.from_json(json.dumps({name: value for name, value in VALID.items() if name != "layers"}))
    assert earlier.layers_of("tidal") == (5,) and earlier == replace(RECIPE, layers={})


def test_sets_per_query_head_have_layers_of_their_own() -> None:
    """Or those per KV head, or those of no method: layers of one kind are often wrong for the other."""
    query = "tidal:heads=query"
    assert [method_of(Policy.from_spec(spec)) for spec in (f"{query},budget=64", "tidal:heads=kv", "less_is_more")] == [
        query, "tidal", "less_is_more",
    ]  # fmt: skip
    own = replace(RECIPE, layers={**RECIPE.layers, query: (4,)})
    assert own.layers_of(query) == (4,) and own.layers_of("tidal") == RECIPE.layers_of(query) == (6,)
    assert replace(RECIPE, layers={}).layers_of(query) == (5,) and Recipe.from_json(own.to_json()) == own
    for name, words in (("tidal:heads=many", "heads='many'"), ("tidl:heads=query", "tidl")):
        with pytest.raises(PolicyError, match=words):
            replace(RECIPE, layers={name: (4,)})


@given(recipes())
def test_what_is_written_reads_back(recipe: Recipe) -> None:
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    # A budget that nobody gave may still be filled in.
    assert again.policy.with_budget(777) == recipe.policy.with_budget(777)


def test_a_recipe_says_what_made_it() -> None:
    made = Recipe(SHAPE, saccade.policy("dense")).versions
    assert list(made) == ["saccade", "python", "torch", "transformers"]
    assert (made["saccade"], made["torch"]) == (saccade.__version__, version("torch"))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"policy": saccade.policy("tidal", reselect=8)}, "reselect=8 is not a selection layer"),
        ({"reselect": (8,)}, "reselect=8 is not a selection layer of this model; valid layers are 0 to 7"),
        ({"layers": {"less_is_more": (9,)}}, "reselect=9"),
        ({"roles": "heads:0+8"}, "heads:8 is not valid: this model has layers 0 to 7"),
        ({"roles": "layers:2"}, "layer 0"),
        ({"roles": "every:4"}, r"roles='every:4' is not valid: heads:L\+L\.H or layers:N\+N"),
    ],
)
def test_a_recipe_fits_its_model(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(saccade.PolicyError, match=words):
        replace(RECIPE, **parts)


# --- what a file must not hold ------------------------------------------------------------------------------------

MANGLED = {
    "a role file": (json.dumps(mangling.ROLE_FILE.valid), ("key 'policy' is missing", ", ".join(VALID))),
    "a policy that is an object": (changed(policy={"name": "dense"}), ("policy={'name': 'dense'}", "a spec")),
    "an unknown policy": (changed(policy="nope"), ("unknown policy 'nope'", "less_is_more")),
    "a policy that does not fit": (changed(policy="tidal:reselect=8"), ("reselect=8", "valid layers are 2 to 7")),
    "one layer": (changed(reselect=5), ("reselect=5 is not valid", "a list of layers, or null")),
    "a boolean layer": (changed(reselect=[True]), ("reselect.0=True", "a list of layers")),
    "roles that are a list": (changed(roles=["heads:0"]), ("roles=['heads:0']", "or null")),
    "scores that are a list": (changed(scores=[1]), ("scores=[1]",)),
    "versions that are null": (changed(versions=None), ("versions=None",)),
    "a version that is a number": (changed(versions={"torch": 2.9}), ("versions.torch=2.9",)),
}


@pytest.mark.parametrize("what", MANGLED)
def test_a_mangled_file_is_refused_in_one_line(what: str) -> None:
    with pytest.raises(saccade.PolicyError) as error:
        Recipe.from_json(MANGLED[what][0])
    check_line(str(error.value), ("recipe: ", *MANGLED[what][1]))


# --- recipes of other models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["no widths", "widths unknown"])
def test_a_recipe_of_before_knew_no_widths(kind: str) -> None:
    """It still reads, and is held against what it knows."""
    widths = ("hidden_size", "intermediate_size")
    model = {key: value for key, value in VALID["model"].items() if key not in widths}
    old = Recipe.from_json(changed(model=model | ({} if kind == "no widths" else dict.fromkeys(widths))))
    assert (old.model.hidden_size, old.model.intermediate_size) == (None, None)
    assert same_model(old.model, SHAPE) and same_model(SHAPE, old.model)
    assert not same_model(old.model, replace(SHAPE, weights="0" * 6))
    assert "hidden_size=unknown" in fingerprint(old.model)
    assert Recipe.from_json(old.to_json()) == old
