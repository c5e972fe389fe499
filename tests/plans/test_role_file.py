"""Role files and lists of retrieving heads: what is written reads back; anything else is refused in one line."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mangling
import saccade
from mangling import ROLE_FILE
from methods.refusing import check_line
from one_line import said
from saccade.plans.head_list import HeadList
from saccade.plans.role_file import RoleFile
from saccade.plans.roles import RoleMap
from saccade.types import ModelShape, Role

SHAPE = replace(mangling.SHAPE, layers=3)
VALID, changed, of_model = ROLE_FILE.valid, ROLE_FILE.changed, ROLE_FILE.of_model
ROLES: list[list[str]] = VALID["roles"]


def role_map(roles: list[list[str]]) -> RoleMap:
    return RoleMap(tuple(tuple(Role(role) for role in layer) for layer in roles))


def test_a_valid_file_is_what_it_says() -> None:
    file = RoleFile.from_json(json.dumps(VALID))
    assert (file.model, file.roles, file.found) == (SHAPE, role_map(ROLES), VALID["found"])


MANGLED = {
    "too few layers": (changed(roles=ROLES[:2]), ("2 layers", "3 layers")),
    "roles that are a name": (changed(roles="publish"), ("roles='publish'", "a list for each layer")),
    "too many heads": (changed(roles=[*ROLES[:2], ["reuse"] * 3]), ("layer 2", "3 heads", "2 KV heads")),
    "a layer that is a name": (changed(roles=[*ROLES[:2], "reuse"]), ("roles.2='reuse'", "one for each KV head")),
    "an unknown role": (
        changed(roles=[*ROLES[:2], ["reuse", "retrieval"]]),
        ("roles.2.1='retrieval'", "dense, publish, select, reuse"),
    ),
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
        line = said(saccade.PolicyError, policy.plan, shape)
        check_line(line, words)
        assert len(line) < 400 + len(str(path))


@pytest.mark.parametrize(
    "other",
    [
        {"layers": 4},
        {"query_heads": 2, "kv_heads": 1},
        {"architecture": "llama"},
        {"weights": "000000"},
        {"hidden_size": 48},
        {"intermediate_size": 48},
    ],
)
def test_a_file_of_another_model_is_refused_with_both_fingerprints(other: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "roles.json"
    path.write_text(json.dumps(VALID))
    shape = replace(SHAPE, **other)
    both = [
        f"{s.architecture} (layers={s.layers}, query_heads={s.query_heads}, kv_heads={s.kv_heads}, "
        f"head_dim={s.head_dim}, hidden_size={s.hidden_size}, intermediate_size={s.intermediate_size}, "
        f"weights={s.weights})"
        for s in (SHAPE, shape)
    ]
    refused((f"{path} belongs to another model: it is for {both[0]}, this one is {both[1]}",), path, shape)


@pytest.mark.parametrize("unknown", ["architecture", "weights", "hidden_size"])
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


def test_roles_may_mix_without_a_note_unless_all_heads_have_one_set(tmp_path: Path) -> None:
    path = tmp_path / "roles.json"
    path.write_text(changed(roles=[["publish", "publish"], ["dense", "select"], ["reuse", "reuse"]]))
    for name in ("lychee_decode", "composed"):
        plan = saccade.policy(name, roles=path).plan(SHAPE)
        assert plan.roles.layers[1] == (Role.DENSE, Role.SELECT) and plan.notes == ()
    path.write_text(json.dumps(VALID))
    with pytest.raises(saccade.PolicyError, match="mixes roles"):
        saccade.policy("composed", roles=path, rule="rank_union").plan(SHAPE)


@pytest.mark.parametrize("role", ["dense", "select"])
def test_lychee_decodes_first_layer_retrieves_with_all_heads(role: str, tmp_path: Path) -> None:
    path = tmp_path / "roles.json"
    path.write_text(changed(roles=[["publish", role], ["publish", "publish"], ["reuse", "reuse"]]))
    with pytest.raises(saccade.PolicyError, match=f"KV head 1 of layer 0 is {role}, but all heads of layer 0 must pub"):
        saccade.policy("lychee_decode", roles=path).plan(SHAPE)
    saccade.policy("composed", roles=path).plan(SHAPE)


P, R = Role.PUBLISH, Role.REUSE
EIGHT = ModelShape(layers=8, query_heads=4, kv_heads=2, head_dim=8, architecture="qwen3")


@st.composite
def role_maps(draw: st.DrawFn) -> RoleMap:
    layers, kv_heads = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    later = st.lists(st.sampled_from([P, R]), min_size=kv_heads, max_size=kv_heads).map(tuple)
    return RoleMap(((P,) * kv_heads, *draw(st.lists(later, min_size=layers - 1, max_size=layers - 1))))


@given(role_maps(), st.randoms())
def test_roles_become_text_and_roles_again(roles: RoleMap, shuffler: random.Random) -> None:
    shape = replace(EIGHT, layers=len(roles.layers), kv_heads=len(roles.layers[0]), query_heads=len(roles.layers[0]))
    text = str(HeadList.of(roles))
    assert HeadList.parse(text).role_map(shape) == roles
    kind, _, rest = text.partition(":")
    parts = rest.split("+") * 2
    shuffler.shuffle(parts)
    assert str(HeadList.parse(f"{kind}:{'+'.join(parts)}")) == text
    for name in ("lychee_decode", "composed"):
        policy = saccade.policy(name, roles=text)
        assert saccade.Policy.from_spec(policy.to_spec()) == policy
        assert policy.plan(shape).roles == roles


def test_a_list_says_what_it_looks_like_and_speaks_of_every_layer() -> None:
    roles = HeadList.parse("heads:0+3.1").role_map(replace(EIGHT, layers=4))
    assert roles.layers == ((P, P), (R, R), (R, R), (R, P))
    assert str(HeadList.of(RoleMap(((P, P), (P, R), (P, P))))) == "heads:0+1.0+2"
    assert saccade.policy("composed", roles="heads:0").plan(EIGHT).roles.layers[1] == (R, R)
    with pytest.raises(saccade.PolicyError, match="dense_layers=2 does not fit roles=heads:0, which speaks of every"):
        saccade.policy("composed", roles="heads:0", dense_layers=2)


def test_what_is_written_is_put_in_order_if_it_is_a_list() -> None:
    ordered = {"07+00": "0+7", "10.1+9.10+9.9+0": "0+9.9+9.10+10.1", "0+7.1+7": "0+7"}
    found = {written: str(saccade.policy("lychee_decode", roles=f"heads:{written}")) for written in ordered}
    assert found == {written: f"lychee_decode:roles=heads:{spec}" for written, spec in ordered.items()}
    for text in ("heads:", "heads:1.", "heads:.1", "heads:1.2.3", "heads:0+", "heads:²"):
        with pytest.raises(saccade.PolicyError, match=r"must be heads:L\+L\.H with whole numbers") as error:
            saccade.policy("lychee_decode", roles=text)
        assert repr(text) in str(error.value)


def test_a_list_that_does_not_fit_the_model() -> None:
    for text, words in (
        ("heads:0+8", ("heads:8 is not valid", "layers 0 to 7 with KV heads 0 to 1")),
        ("heads:0+7.2", ("heads:7.2 is not valid", "layers 0 to 7 with KV heads 0 to 1")),
        ("heads:0.0+3.1", ("KV head 1 of layer 0 reuses", "no layer below refreshes head 1")),
    ):
        for name in ("lychee_decode", "composed"):
            line = said(saccade.PolicyError, saccade.policy(name, roles=text).plan, EIGHT)
            check_line(line, (f"policy {name}: roles: ", *words))


def test_other_roles_have_no_list() -> None:
    for role in (Role.DENSE, Role.SELECT):
        with pytest.raises(saccade.PolicyError, match=rf"KV head 1 of layer 1 is {role.value}, but heads:L\+L\.H says"):
            HeadList.of(RoleMap(((P, P), (P, role))))
