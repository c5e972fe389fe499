"""Recipes, role files and records of drafts: what is written reads back; anything else is refused in one line."""

import json
import math
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mangling
import saccade
from mangling import FREE, RECIPE, ROLE_FILE, SHAPE, Document
from methods.drawing import OPTIONS
from one_line import lacking, said
from saccade import Policy, PolicyError, Recipe
from saccade.plans.identity import fingerprint, same_model
from saccade.recipes.acceptance import Acceptance
from saccade.recipes.recipe import method_of


def named(part: Document | str) -> str:
    return part if isinstance(part, str) else part.kind.KIND


of_each = pytest.mark.parametrize("document", [ROLE_FILE, RECIPE], ids=named)


def refused(document: Document, path: Path, says: str, words: tuple[str, ...]) -> None:
    message = said(saccade.PolicyError, document.kind.read, path)
    assert message.startswith(f"{document.kind.KIND} {path}{says}: ")
    assert lacking([(message, words)]) == [] and len(message) < 400 + len(str(path))


@of_each
def test_a_valid_file_reads_and_is_written_as_it_was(document: Document, tmp_path: Path) -> None:
    path, again = tmp_path / "any name.json", tmp_path / "again.json"
    path.write_text(json.dumps(document.valid))
    file = document.kind.read(path)
    assert json.loads(file.to_json()) == document.valid
    file.write(again)
    assert document.kind.read(again) == file
    assert {other.name for other in tmp_path.iterdir()} == {path.name, again.name}
    with pytest.raises(saccade.OutputError, match=r"nowhere.*cannot be written: No such file"):
        file.write(tmp_path / "nowhere" / "roles.json")
    with pytest.raises(saccade.PolicyError, match=f"a {document.kind.KIND} names its model's architecture"):
        replace(file, model=replace(file.model, architecture=None)).to_json()


@of_each
@pytest.mark.parametrize("value", [math.nan, object()], ids=["NaN", "an object"])
def test_free_parts_must_be_json(document: Document, value: object) -> None:
    file = document.kind.from_json(json.dumps(document.valid))
    for part in {"found", "scores"} & set(document.valid):
        with pytest.raises(saccade.PolicyError, match=r"found( and scores)? must be JSON without NaN"):
            replace(file, **{part: {"loss": value}}).to_json()


OWN = [(RECIPE, f"no {key}") for key in RECIPE.valid] + [(RECIPE, "an unknown key of the model")]
"""What a recipe might read otherwise than a role file, which is all that is said of a file in one place."""


@pytest.mark.parametrize(("document", "what"), [(ROLE_FILE, what) for what in ROLE_FILE.mangled] + OWN, ids=named)
def test_a_mangled_file_is_refused_in_one_line(document: Document, what: str, tmp_path: Path) -> None:
    text, words = document.mangled[what]
    path = tmp_path / "file.json"
    path.write_text(text)
    refused(document, path, "", words)


@of_each
@given(data=st.data())
def test_no_other_value_but_a_valid_one_gets_through(document: Document, data: st.DataObject) -> None:
    """Whatever stands at one place of a valid file: it reads, or one line says why not."""
    text = data.draw(document.others)
    try:
        document.kind.from_json(text)
    except saccade.PolicyError as error:
        assert str(error).startswith(f"{document.kind.KIND}: ") and len(str(error).splitlines()) == 1  # noqa: PT017


@of_each
def test_a_file_that_cannot_be_read_is_named(document: Document, tmp_path: Path) -> None:
    binary = tmp_path / "file.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, word in ((tmp_path / "no.json", "No such file"), (tmp_path, "directory"), (binary, "utf-8")):
        refused(document, path, " cannot be read", (word,))


VALID, changed = mangling.RECIPE.valid, mangling.RECIPE.changed
MADE = Recipe(
    SHAPE,
    saccade.policy("less_is_more", reselect=5),
    (5,),
    "heads:0+3.1",
    VALID["found"],
    VALID["scores"],
    VALID["versions"],
    {"tidal": (6,)},
)


def test_a_valid_recipe_is_what_it_says_with_layers_by_method() -> None:
    """Whichever was looked for last; a file of earlier versions has one list for all."""
    assert Recipe.from_json(json.dumps(VALID)) == MADE
    assert [MADE.layers_of(name) for name in ("tidal", "less_is_more")] == [(6,), (5,)]
    earlier = Recipe.from_json(json.dumps({name: value for name, value in VALID.items() if name != "layers"}))
    assert earlier.layers_of("tidal") == (5,) and earlier == replace(MADE, layers={})
    # Sets per query head have their own, or those per KV head: layers of one kind are often wrong for the other.
    query = "tidal:heads=query"
    assert [method_of(Policy.from_spec(spec)) for spec in (f"{query},budget=64", "tidal:heads=kv", "less_is_more")] == [
        query, "tidal", "less_is_more",
    ]  # fmt: skip
    own = replace(MADE, layers={**MADE.layers, query: (4,)})
    assert own.layers_of(query) == (4,) and own.layers_of("tidal") == MADE.layers_of(query) == (6,)
    assert replace(MADE, layers={}).layers_of(query) == (5,) and Recipe.from_json(own.to_json()) == own
    for name, words in (("tidal:heads=many", "heads='many'"), ("tidl:heads=query", "tidl")):
        with pytest.raises(PolicyError, match=words):
            replace(MADE, layers={name: (4,)})


def test_a_recipe_says_what_made_it() -> None:
    made = Recipe(SHAPE, saccade.policy("dense")).versions
    assert list(made) == ["saccade", "python", "torch", "transformers"]
    assert (made["saccade"], made["torch"]) == (saccade.__version__, version("torch"))


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


@given(recipes())
def test_what_is_written_reads_back(recipe: Recipe) -> None:
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    # A budget that nobody gave may still be filled in.
    assert again.policy.with_budget(777) == recipe.policy.with_budget(777)


def test_a_recipe_fits_its_model() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"policy": saccade.policy("tidal", reselect=8)}, "reselect=8 is not a selection layer"),
        ({"reselect": (8,)}, "reselect=8 is not a selection layer of this model; valid layers are 0 to 7"),
        ({"layers": {"less_is_more": (9,)}}, "reselect=9"),
        ({"roles": "heads:0+8"}, "heads:8 is not valid: this model has layers 0 to 7"),
        ({"roles": "layers:2"}, "layer 0"),
        ({"roles": "every:4"}, "roles='every:4' is not valid: heads:L+L.H or layers:N+N"),
    ]
    assert lacking((said(PolicyError, replace, MADE, **parts), (words,)) for parts, words in refused) == []


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


def test_a_mangled_recipe_is_refused_in_one_line() -> None:
    lines = ((said(PolicyError, Recipe.from_json, text), ("recipe: ", *words)) for text, words in MANGLED.values())
    assert lacking(lines) == []


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


TOLD = {"version": 1, "policy": "quest:rectify=8:verify", "model": None, "date": "2026-11-29"}
TOLD |= {"drafted": [40, 20, 20], "accepted": [30, 12, 0]}
ODD = "drafted and accepted are not valid"


def test_it_reads_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.json"
    Acceptance.from_json(json.dumps(TOLD), "").write(path)
    assert json.loads(path.read_text()) == TOLD and Acceptance.read(path).drafted == (40, 20, 20)
    # Cycles of one draft have none behind it: 12 of 20 reach as far, of which 30 of 40 would.
    assert Acceptance.read(path).chances == pytest.approx([0.75, 0.8, 0.0])


def test_what_is_not_its_own_is_refused() -> None:
    refused: list[tuple[str, Any, str]] = [
        ("extra", 1, "unknown key 'extra'; its keys are version, policy"),
        ("version", 2, "this saccade reads version 1"),
        ("policy", "foresight", "unknown policy 'foresight'"),
        ("date", "today", "YYYY-MM-DD"),
        ("drafted", [], "at least one"),
        ("drafted", [40, 20], ODD),
        ("drafted", [40, 20, 0], ODD),
        ("accepted", [41, 12, 0], ODD),
    ]
    for name, value, words in refused:
        line = said(PolicyError, Acceptance.from_json, json.dumps({**TOLD, name: value}), "acceptance a.json")
        assert line.startswith("acceptance a.json: ") and lacking([(line, (words,))]) == []
