"""Lists of retrieving heads: text that fits into a spec, and the roles that it stands for."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import saccade
from methods.refusing import check_line
from saccade.plans.head_list import HeadList
from saccade.plans.roles import RoleMap
from saccade.types import ModelShape, Role

P, R = Role.PUBLISH, Role.REUSE
SHAPE = ModelShape(layers=8, query_heads=4, kv_heads=2, head_dim=8, architecture="qwen3")


@st.composite
def role_maps(draw: st.DrawFn) -> RoleMap:
    layers, kv_heads = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    later = st.lists(st.sampled_from([P, R]), min_size=kv_heads, max_size=kv_heads).map(tuple)
    return RoleMap(((P,) * kv_heads, *draw(st.lists(later, min_size=layers - 1, max_size=layers - 1))))


@given(role_maps(), st.randoms())
def test_roles_become_text_and_roles_again(roles: RoleMap, shuffler: random.Random) -> None:
    shape = replace(SHAPE, layers=len(roles.layers), kv_heads=len(roles.layers[0]), query_heads=len(roles.layers[0]))
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


def test_a_list_says_what_it_looks_like() -> None:
    roles = HeadList.parse("heads:0+3.1").role_map(replace(SHAPE, layers=4))
    assert roles.layers == ((P, P), (R, R), (R, R), (R, P))
    assert str(HeadList.of(RoleMap(((P, P), (P, R), (P, P))))) == "heads:0+1.0+2"


@pytest.mark.parametrize(
    ("written", "spec"),
    [("heads:07+00", "heads:0+7"), ("heads:10.1+9.10+9.9+0", "heads:0+9.9+9.10+10.1"), ("heads:0+7.1+7", "heads:0+7")],
)
def test_what_is_written_is_put_in_order(written: str, spec: str) -> None:
    assert str(saccade.policy("lychee_decode", roles=written)) == f"lychee_decode:roles={spec}"


@pytest.mark.parametrize("text", ["heads:", "heads:1.", "heads:.1", "heads:1.2.3", "heads:0+", "heads:²"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(saccade.PolicyError, match=r"must be heads:L\+L\.H with whole numbers") as error:
        saccade.policy("lychee_decode", roles=text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("heads:0+8", ("heads:8 is not valid", "layers 0 to 7 with KV heads 0 to 1")),
        ("heads:0+7.2", ("heads:7.2 is not valid", "layers 0 to 7 with KV heads 0 to 1")),
        ("heads:0.0+3.1", ("KV head 1 of layer 0 reuses", "no layer below refreshes head 1")),
    ],
)
def test_a_list_that_does_not_fit_the_model(text: str, words: tuple[str, ...]) -> None:
    for name in ("lychee_decode", "composed"):
        with pytest.raises(saccade.PolicyError) as error:
            saccade.policy(name, roles=text).plan(SHAPE)
        check_line(str(error.value), (f"policy {name}: roles: ", *words))


def test_a_list_speaks_of_every_layer() -> None:
    assert saccade.policy("composed", roles="heads:0").plan(SHAPE).roles.layers[1] == (R, R)
    with pytest.raises(saccade.PolicyError, match="dense_layers=2 does not fit roles=heads:0, which speaks of every"):
        saccade.policy("composed", roles="heads:0", dense_layers=2)


@pytest.mark.parametrize("role", [Role.DENSE, Role.SELECT])
def test_other_roles_have_no_list(role: Role) -> None:
    with pytest.raises(saccade.PolicyError, match=rf"KV head 1 of layer 1 is {role.value}, but heads:L\+L\.H says"):
        HeadList.of(RoleMap(((P, P), (P, role))))
