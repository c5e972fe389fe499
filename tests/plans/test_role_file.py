"""Role files: what is written reads back; whatever else a file may hold is refused in one line that names it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import saccade
from mangling import Document, reads_or_says_why
from saccade.plans.role_file import RoleFile
from saccade.plans.roles import RoleMap
from saccade.types import ModelShape, Role

SHAPE = ModelShape(layers=3, query_heads=4, kv_heads=2, head_dim=8, architecture="qwen3", weights="9f31c2")
SHAPE = replace(SHAPE, hidden_size=32, intermediate_size=64)
ROLES = [["publish", "publish"], ["reuse", "publish"], ["reuse", "reuse"]]
VALID: dict[str, Any] = {
    "version": 1,
    "model": {
        "architecture": "qwen3", "layers": 3, "query_heads": 4, "kv_heads": 2, "head_dim": 8, "weights": "9f31c2",
        "hidden_size": 32, "intermediate_size": 64,
    },
    "roles": ROLES,
    "found": {"method": "hardkuma", "steps": 3000, "expected": [0.25, 1e-3]},
}  # fmt: skip


DOCUMENT = Document(VALID)
changed, of_model, without = DOCUMENT.changed, DOCUMENT.of_model, DOCUMENT.without


def role_map(roles: list[list[str]]) -> RoleMap:
    return RoleMap(tuple(tuple(Role(role) for role in layer) for layer in roles))


# --- there and back -----------------------------------------------------------------------------------------------


def test_a_valid_file_is_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "roles.json"
    path.write_text(json.dumps(VALID))
    file = RoleFile.read(path)
    assert (file.model, file.roles, file.found) == (SHAPE, role_map(ROLES), VALID["found"])
    assert json.loads(file.to_json()) == VALID


@st.composite
def role_files(draw: st.DrawFn) -> RoleFile:
    layers, kv_heads, group = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    shape = ModelShape(
        layers,
        kv_heads * group,
        kv_heads,
        draw(st.integers(1, 256)),
        draw(st.text(min_size=1, max_size=8)),
        draw(st.none() | st.text(max_size=8)),
    )
    later = st.lists(st.sampled_from(Role), min_size=kv_heads, max_size=kv_heads).map(tuple)
    first = (Role.PUBLISH,) * kv_heads
    roles = (first, *draw(st.lists(later, min_size=layers - 1, max_size=layers - 1)))
    plain = st.none() | st.booleans() | st.integers(-9, 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    found = draw(st.dictionaries(st.text(max_size=5), plain | st.text(max_size=5) | st.lists(plain, max_size=2)))
    return RoleFile(shape, RoleMap(roles), found)


@given(role_files())
def test_what_is_written_reads_back(file: RoleFile) -> None:
    assert RoleFile.from_json(file.to_json()) == file


def test_found_must_be_json() -> None:
    for value in (math.nan, math.inf, object()):
        with pytest.raises(saccade.PolicyError, match="found must be JSON"):
            RoleFile(SHAPE, role_map(ROLES), {"loss": value}).to_json()


def test_a_file_names_its_models_architecture() -> None:
    with pytest.raises(saccade.PolicyError, match="architecture"):
        RoleFile(replace(SHAPE, architecture=None), role_map(ROLES)).to_json()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(saccade.OutputError, match=r"nowhere.*cannot be written: No such file"):
        RoleFile(SHAPE, role_map(ROLES)).write(tmp_path / "nowhere" / "roles.json")


# --- what a file must not hold ------------------------------------------------------------------------------------

MANGLED = {
    "empty": ("", ("not JSON",)),
    "truncated": (json.dumps(VALID)[:-20], ("not JSON",)),
    "deep": ("[" * 100_000, ("not JSON",)),
    "a huge number": (changed(version=0).replace('"version": 0', '"version": 1' + "0" * 5000), ("not JSON",)),
    "a list": ("[]", ("the file is not an object", "version, model, roles, found")),
    "NaN in found": (changed(found={"loss": math.nan}), ("NaN", "finite")),
    "NaN in roles": (changed(roles=[[math.nan, "publish"], *ROLES[1:]]), ("NaN", "finite")),
    "infinity": (changed(found={"loss": [-math.inf]}), ("-Infinity", "finite")),
    "a number beyond floats": (changed(found={"loss": 0}).replace('"loss": 0', '"loss": 1e999'), ("1e999", "finite")),
    "a key twice": (json.dumps(VALID)[:-1] + ', "version": 1}', ("'version' is given twice",)),
    "an unknown key": (changed(extra=1), ("unknown key 'extra'", "version, model, roles, found")),
    "an unknown key of the model": (of_model(heads=2), ("unknown key 'model.heads'", "kv_heads")),
    "no roles": (without("roles"), ("'roles' is missing",)),
    "no weights": (without("model", "weights"), ("'model.weights' is missing",)),
    "version 2": (changed(version=2), ("version=2", "reads version 1")),
    "version true": (changed(version=True), ("version=True",)),
    "version text": (changed(version="1"), ("version='1'",)),
    "a model that is a name": (changed(model="qwen3"), ("model is not an object", "architecture")),
    "an architecture that is a number": (of_model(architecture=3), ("model.architecture=3",)),
    "weights that are a number": (of_model(weights=3), ("model.weights=3",)),
    "no layers": (of_model(layers=0), ("model.layers=0", "at least 1")),
    "half a head": (of_model(kv_heads=1.5), ("model.kv_heads=1.5",)),
    "a boolean size": (of_model(head_dim=True), ("model.head_dim=True",)),
    "heads that do not divide": (of_model(query_heads=5), ("query_heads=5", "multiple of kv_heads=2")),
    "too few layers": (changed(roles=ROLES[:2]), ("2 layers", "3 layers")),
    "roles that are a name": (changed(roles="publish"), ("roles='publish'", "a list for each layer")),
    "too many heads": (changed(roles=[*ROLES[:2], ["reuse"] * 3]), ("layer 2", "3 heads", "2 KV heads")),
    "a layer that is a name": (changed(roles=[*ROLES[:2], "reuse"]), ("roles.2='reuse'", "one for each KV head")),
    "an unknown role": (
        changed(roles=[*ROLES[:2], ["reuse", "retrieval"]]),
        ("roles.2.1='retrieval'", "dense, publish, select, reuse"),
    ),
    "a role that is a number": (
        changed(roles=[*ROLES[:2], ["reuse", 1]]),
        ("roles.2.1=1", "dense, publish, select, reuse"),
    ),
    "found that is text": (changed(found="somehow"), ("found='somehow'",)),
    "a reuser below its publisher": (
        changed(roles=[["publish", "dense"], ["reuse", "reuse"], ["publish", "publish"]]),
        ("KV head 1 of layer 1 reuses", "no layer below refreshes head 1"),
    ),
}


@pytest.mark.parametrize("what", MANGLED)
def test_a_mangled_file_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    text, words = MANGLED[what]
    path = tmp_path / "roles.json"
    path.write_text(text)
    refused((f"role file {path}: ", *words), path, SHAPE)


def refused(words: tuple[str, ...], path: Path, shape: ModelShape) -> None:
    """Binding a policy to a model refuses the file in one line that holds all words."""
    for policy in (saccade.policy("lychee_decode", roles=path), saccade.policy("composed", roles=str(path))):
        with pytest.raises(saccade.PolicyError) as error:
            policy.plan(shape)
        message = str(error.value)
        assert "\n" not in message and len(message) < 400 + len(str(path))
        assert all(word in message for word in words), message


@pytest.mark.parametrize("text", DOCUMENT.truncations, ids=len)
def test_no_truncation_gets_through(text: str) -> None:
    with pytest.raises(saccade.PolicyError, match="role file: not JSON"):
        RoleFile.from_json(text)


@given(DOCUMENT.others)
def test_no_other_value_but_a_valid_one_gets_through(text: str) -> None:
    """Whatever stands at one place of a valid file."""
    reads_or_says_why(RoleFile.from_json, text, "role file: ")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "roles.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    refused((str(tmp_path / "no.json"), "No such file"), tmp_path / "no.json", SHAPE)
    refused((str(tmp_path), "directory"), tmp_path, SHAPE)
    refused((str(binary), "utf-8"), binary, SHAPE)


# --- files of other models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"layers": 4},
        {"query_heads": 8},
        {"head_dim": 16},
        {"query_heads": 2, "kv_heads": 1},
        {"architecture": "llama"},
        {"weights": "000000"},
    ],
)
def test_a_file_of_another_model_is_refused_with_both_fingerprints(other: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "roles.json"
    path.write_text(json.dumps(VALID))
    shape = replace(SHAPE, **other)
    both = [
        f"{s.architecture} (layers={s.layers}, query_heads={s.query_heads}, kv_heads={s.kv_heads}, "
        f"head_dim={s.head_dim}, hidden_size=32, intermediate_size=64, weights={s.weights})"
        for s in (SHAPE, shape)
    ]
    refused((f"{path} belongs to another model: it is for {both[0]}, this one is {both[1]}",), path, shape)


@pytest.mark.parametrize("unknown", ["architecture", "weights", "hidden_size", "intermediate_size"])
def test_what_nobody_knows_is_not_compared(unknown: str, tmp_path: Path) -> None:
    path = tmp_path / "roles.json"
    path.write_text(json.dumps(VALID))
    policy = saccade.policy("lychee_decode", roles=path)
    assert policy.plan(replace(SHAPE, **{unknown: None})).roles == role_map(ROLES)
    path.write_text(of_model(weights=None))
    assert policy.plan(SHAPE).roles == role_map(ROLES)


HOLES = [["publish", "publish"], [], ["reuse", "reuse"]]
MIXED = replace(SHAPE, kinds=("full_attention", "sliding_attention", "full_attention"))


def test_roles_are_of_the_layers_with_full_attention(tmp_path: Path) -> None:
    path = tmp_path / "roles.json"
    path.write_text(changed(roles=HOLES))
    assert saccade.policy("lychee_decode", roles=path).plan(MIXED).roles.concerned == (0, 2)
    refused(("has no roles for layer 1", "full attention, which need them, are 0 to 2"), path, SHAPE)
    path.write_text(json.dumps(VALID))
    refused(("has roles for layer 1", "full attention, which need them, are 0, 2"), path, MIXED)


def test_roles_may_mix_and_leave_no_note(tmp_path: Path) -> None:
    path = tmp_path / "roles.json"
    path.write_text(changed(roles=[["publish", "publish"], ["dense", "select"], ["reuse", "reuse"]]))
    for name in ("lychee_decode", "composed"):
        plan = saccade.policy(name, roles=path).plan(SHAPE)
        assert plan.roles.layers[1] == (Role.DENSE, Role.SELECT) and plan.notes == ()


@pytest.mark.parametrize("role", ["dense", "select"])
def test_lychee_decodes_first_layer_retrieves_with_all_heads(role: str, tmp_path: Path) -> None:
    path = tmp_path / "roles.json"
    path.write_text(changed(roles=[["publish", role], ["publish", "publish"], ["reuse", "reuse"]]))
    with pytest.raises(saccade.PolicyError, match=f"KV head 1 of layer 0 is {role}, but all heads of layer 0 must pub"):
        saccade.policy("lychee_decode", roles=path).plan(SHAPE)
    saccade.policy("composed", roles=path).plan(SHAPE)


def test_one_set_for_all_heads_needs_one_role_per_layer(tmp_path: Path) -> None:
    path = tmp_path / "roles.json"
    path.write_text(json.dumps(VALID))
    with pytest.raises(saccade.PolicyError, match="mixes roles"):
        saccade.policy("composed", roles=path, rule="rank_union").plan(SHAPE)
