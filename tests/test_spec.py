"""Policies as data: spec strings, JSON, defaults, and one clear line for everything that is not valid."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import saccade
from saccade.types import ModelShape

SHAPE = ModelShape(layers=8, query_heads=4, kv_heads=2, head_dim=8)

BUDGETS = st.integers(64, 2**20)
LAYERS = st.none() | st.lists(st.integers(2, 7), max_size=3)
OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "dense": {},
    "streaming": {"budget": BUDGETS, "sinks": st.integers(0, 16), "dense_layers": st.integers(0, 2)},
    "quest": {
        "budget": BUDGETS,
        "page": st.integers(1, 64),
        "heads": st.sampled_from(["kv", "query"]),
        "dense_layers": st.integers(0, 2),
    },
    "tidal": {
        "budget": BUDGETS,
        "reselect": LAYERS,
        "heads": st.sampled_from(["kv", "query"]),
        "dense_layers": st.integers(0, 2),
    },
    "less_is_more": {
        "budget": BUDGETS,
        "reselect": LAYERS,
        "sinks": st.integers(0, 16),
        "recent": st.floats(0, 1),
        "dense_layers": st.integers(0, 2),
    },
}


@st.composite
def policies(draw: st.DrawFn) -> saccade.Policy:
    name = draw(st.sampled_from(sorted(OPTIONS)))
    given_names = draw(st.sets(st.sampled_from(sorted(OPTIONS[name])))) if OPTIONS[name] else set()
    return saccade.policy(name, **{option: draw(OPTIONS[name][option]) for option in sorted(given_names)})


# --- round trips -------------------------------------------------------------------------------------------------


@given(policies())
def test_round_trips(policy: saccade.Policy) -> None:
    assert saccade.Policy.from_json(policy.to_json()) == policy
    assert saccade.Policy.from_spec(policy.to_spec()) == policy
    assert saccade.Policy.from_spec(str(policy)) == policy
    assert policy.plan(SHAPE) == saccade.Policy.from_json(policy.to_json()).plan(SHAPE)


@given(policies())
def test_json_is_plain_and_complete(policy: saccade.Policy) -> None:
    data = json.loads(policy.to_json())
    assert sorted(data) == ["name", "options", "version"]
    assert set(data["options"]) == set(OPTIONS[policy.name])
    assert hash(policy) == hash(saccade.Policy.from_json(policy.to_json()))


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("dense", "dense", {}),
        ("tidal", "tidal", {}),
        (" quest:budget=64 ", "quest", {"budget": 64}),
        ("quest: budget=64 , page=8,", "quest", {"budget": 64, "page": 8}),
        ("tidal:reselect=12+20", "tidal", {"reselect": [12, 20]}),
        ("tidal:reselect=12", "tidal", {"reselect": 12}),
        ("tidal:reselect=", "tidal", {"reselect": []}),
        ("less_is_more:recent=0.5,budget=2048", "less_is_more", {"recent": 0.5, "budget": 2048}),
        ("less_is_more:recent=1", "less_is_more", {"recent": 1}),
        ("streaming:sinks=0", "streaming", {"sinks": 0}),
        ("quest:heads=query", "quest", {"heads": "query"}),
    ],
)
def test_spec_is_the_python_call(spec: str, name: str, options: dict[str, Any]) -> None:
    assert saccade.Policy.from_spec(spec) == saccade.policy(name, **options)


def test_one_layer_is_a_list_of_one() -> None:
    assert saccade.policy("tidal", reselect=5) == saccade.policy("tidal", reselect=[5])
    assert saccade.policy("tidal", reselect=5) != saccade.policy("tidal", reselect=[])


# --- the mapping of policies -------------------------------------------------------------------------------------


def test_policies_is_a_mapping_of_descriptions() -> None:
    table = saccade.policies()
    assert list(table) == ["dense", "streaming", "quest", "tidal", "less_is_more"]
    for name, description in table.items():
        assert description.name == name and description.summary and description.source
        assert set(description.defaults) == set(OPTIONS[name]) == set(description.help)
        assert all(description.help.values())
        assert description.has_budget == ("budget" in OPTIONS[name])
    with pytest.raises(TypeError):
        table["dense"] = None  # type: ignore[index]


def test_defaults_are_the_papers() -> None:
    assert saccade.policies()["less_is_more"].defaults == {
        "budget": 2048, "reselect": None, "sinks": 4, "recent": 0.25, "dense_layers": 2,
    }  # fmt: skip
    assert saccade.policies()["quest"].defaults == {"budget": 2048, "page": 16, "heads": "kv", "dense_layers": 2}
    assert saccade.policies()["tidal"].defaults == {"budget": 2048, "reselect": None, "heads": "kv", "dense_layers": 2}
    assert saccade.policies()["streaming"].defaults["sinks"] == 4


def test_policies_are_frozen() -> None:
    policy = saccade.policy("quest")
    with pytest.raises(AttributeError):
        policy.name = "dense"  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        policy.options.budget = 3  # type: ignore[attr-defined]


# --- budgets -----------------------------------------------------------------------------------------------------


def test_budget_fills_in_where_none_was_given() -> None:
    assert saccade.policy("tidal", heads="query").with_budget(64) == saccade.policy("tidal", heads="query", budget=64)
    given_one = saccade.policy("tidal", budget=2048)  # the default, but given
    assert given_one.with_budget(64) is given_one
    dense = saccade.policy("dense")
    assert dense.with_budget(64) is dense and dense.budget is None
    with pytest.raises(saccade.PolicyError, match="budget=3"):
        saccade.policy("quest").with_budget(3)


SMALLEST = [
    ({"name": "streaming"}, 5),
    ({"name": "streaming", "sinks": 0}, 1),
    ({"name": "quest"}, 16),
    ({"name": "quest", "page": 3}, 3),
    ({"name": "tidal"}, 1),
    ({"name": "less_is_more"}, 6),
    ({"name": "less_is_more", "sinks": 0}, 2),
    ({"name": "less_is_more", "recent": 1.0}, 6),
]


@pytest.mark.parametrize(("options", "smallest"), SMALLEST)
def test_smallest_legal_budget(options: dict[str, Any], smallest: int) -> None:
    """The smallest works; one less is an error that names it."""
    saccade.policy(**options, budget=smallest).plan(SHAPE)
    bad(str(smallest), **options, budget=smallest - 1)


# --- bad input ---------------------------------------------------------------------------------------------------


def bad(*words: str, **options: Any) -> None:
    """`saccade.policy` refuses in one line that holds all words."""
    with pytest.raises(saccade.PolicyError) as error:
        saccade.policy(**options)
    check_line(str(error.value), words)


def check_line(message: str, words: tuple[str, ...]) -> None:
    assert "\n" not in message and message == message.strip()
    assert all(word in message for word in words), message


BUDGETED = ["streaming", "quest", "tidal", "less_is_more"]


@pytest.mark.parametrize(
    "value", [0, -1, -(10**12), math.nan, math.inf, 2.5, "abc", "", "1e3", None, True, [64], "64+64"]
)
@pytest.mark.parametrize("name", BUDGETED)
def test_bad_budget(name: str, value: Any) -> None:
    bad(f"policy {name}", "budget", repr(value), name=name, budget=value)


@pytest.mark.parametrize("value", [-0.001, 1.001, 25, math.nan, math.inf, "abc", "", None, [0.5], True])
def test_bad_recent(value: Any) -> None:
    bad("policy less_is_more", "recent", repr(value), name="less_is_more", recent=value)


@pytest.mark.parametrize("value", [-1, "x", 1.5, [1.5], ["x"], [-1], "3+x", "3-4", True, [True]])
@pytest.mark.parametrize("name", ["tidal", "less_is_more"])
def test_bad_reselect(name: str, value: Any) -> None:
    bad(f"policy {name}", "reselect", name=name, reselect=value)


@pytest.mark.parametrize("layer", [0, 1, 8, 99])
@pytest.mark.parametrize("name", ["tidal", "less_is_more"])
def test_reselect_out_of_the_models_range(name: str, layer: int) -> None:
    """Known only once there is a model: under the dense layers, or beyond the last."""
    with pytest.raises(saccade.PolicyError) as error:
        saccade.policy(name, reselect=[3, layer]).plan(SHAPE)
    check_line(str(error.value), (f"policy {name}", f"reselect={layer}", "valid layers are 2 to 7"))


@pytest.mark.parametrize("name", BUDGETED)
def test_no_layer_left_to_select_at(name: str) -> None:
    with pytest.raises(saccade.PolicyError, match=r"dense_layers=8.*0 to 7 are valid"):
        saccade.policy(name, dense_layers=8).plan(SHAPE)


def test_unset_reselect_takes_the_middle_layer_and_says_so() -> None:
    plan = saccade.policy("tidal").plan(SHAPE)
    assert (
        plan == saccade.policy("tidal", reselect=4).plan(SHAPE)
        or plan.roles == saccade.policy("tidal", reselect=4).plan(SHAPE).roles
    )
    assert "L//2 = 4 of 8" in plan.notes[0]
    assert saccade.policy("tidal", reselect=4).plan(SHAPE).notes == ()


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("quest", "page", 0),
        ("quest", "page", -16),
        ("quest", "page", "big"),
        ("quest", "heads", "all"),
        ("tidal", "heads", "KV"),
        ("tidal", "heads", None),
        ("streaming", "sinks", -1),
        ("streaming", "sinks", 1.5),
        ("less_is_more", "dense_layers", -1),
        ("less_is_more", "dense_layers", False),
    ],
)
def test_bad_value(name: str, option: str, value: Any) -> None:
    bad(f"policy {name}", option, repr(value), name=name, **{option: value})


def test_bad_choice_names_the_valid_ones() -> None:
    bad("heads='each'", "'kv' or 'query'", name="quest", heads="each")


@pytest.mark.parametrize("name", [*OPTIONS])
def test_unknown_option_names_the_valid_ones(name: str) -> None:
    bad(f"policy {name} has no option 'budgets'", *(OPTIONS[name] or ["none"]), name=name, budgets=64)


@pytest.mark.parametrize("name", ["", "Quest", "lychee", "quest "])
def test_unknown_policy_names_the_valid_ones(name: str) -> None:
    bad(f"unknown policy {name!r}", *OPTIONS, name=name)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", ("unknown policy ''", "quest")),
        (":budget=3", ("unknown policy ''",)),
        ("nope:budget=3", ("unknown policy 'nope'", "less_is_more")),
        ("quest:budget", ("'budget' is not key=value",)),
        ("quest:64", ("'64' is not key=value",)),
        ("quest:budget=64,budget=128", ("'budget' is given twice",)),
        ("quest:=64", ("policy quest has no option ''",)),
        ("quest:budget==64", ("budget", "'=64'")),
        ("quest:budget=64=64", ("budget", "'64=64'")),
        ("quest:budget=0", ("budget", "'0'")),
        ("tidal:reselect=3,4", ("'4' is not key=value",)),
        ("tidal:reselect=+", ("reselect", "''")),
        ("tidal:reselect=3+", ("reselect", "''")),
        ("dense:budget=64", ("policy dense has no option 'budget'", "none")),
        ("quest:budget=64\npage=4", ("budget",)),
        ("quest\n", ()),
    ],
)
def test_bad_spec(spec: str, words: tuple[str, ...]) -> None:
    if not words:
        assert saccade.Policy.from_spec(spec).name == spec.strip()
        return
    with pytest.raises(saccade.PolicyError) as error:
        saccade.Policy.from_spec(spec)
    check_line(str(error.value), words)


VALID = {"version": 1, "name": "quest", "options": {"budget": 64}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("cannot be read",)),
        ("{", ("cannot be read",)),
        ("[" * 100_000, ("cannot be read",)),
        ('{"version": 1' + "0" * 5000 + "}", ("cannot be read",)),
        ("null", ("exactly the keys name, options, version",)),
        ("[]", ("exactly the keys",)),
        ('"quest"', ("exactly the keys",)),
        (json.dumps({**VALID, "extra": 1}), ("exactly the keys",)),
        (json.dumps({"name": "quest", "options": {}}), ("exactly the keys",)),
        (json.dumps({**VALID, "version": 2}), ("version 2", "reads version 1")),
        (json.dumps({**VALID, "version": "1"}), ("version '1'",)),
        (json.dumps({**VALID, "version": True}), ("version True",)),
        (json.dumps({**VALID, "name": 3}), ("name=3",)),
        (json.dumps({**VALID, "name": "nope"}), ("unknown policy 'nope'",)),
        (json.dumps({**VALID, "options": []}), ("exactly the keys", "options")),
        (json.dumps({**VALID, "options": {"budgets": 1}}), ("has no option 'budgets'",)),
        (json.dumps({**VALID, "options": {"budget": math.nan}}), ("budget", "nan")),
        (json.dumps({**VALID, "options": {"budget": "many"}}), ("budget", "'many'")),
    ],
)
def test_bad_json(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(saccade.PolicyError) as error:
        saccade.Policy.from_json(text)
    check_line(str(error.value), words)


@given(st.text(max_size=40))
def test_no_text_but_a_spec_gets_through(text: str) -> None:
    """Any text is a policy or a one-line `PolicyError`, as spec and as JSON."""
    for read in (saccade.Policy.from_spec, saccade.Policy.from_json):
        assert refusal(lambda read=read: read(text)) in (0, 1)


@given(
    st.sampled_from(sorted(OPTIONS)),
    st.dictionaries(
        st.sampled_from(["budget", "sinks", "page", "recent", "reselect", "heads"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.lists(st.integers(-2, 9), max_size=2),
    ),
)
def test_no_value_but_a_valid_one_gets_through(name: str, options: dict[str, Any]) -> None:
    def bind() -> None:
        policy = saccade.policy(name, **options)
        policy.plan(SHAPE)
        assert policy.budget is None or policy.budget >= 1

    assert refusal(bind) in (0, 1)


def refusal(call: Callable[[], object]) -> int:
    """Lines of the `PolicyError` that a call raises, 0 if it raises none; other errors pass through."""
    try:
        call()
    except saccade.PolicyError as error:
        return len(str(error).splitlines())
    return 0
