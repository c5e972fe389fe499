"""Policies as data: spec strings, JSON, defaults, and one clear line for everything that is not valid."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import saccade
from saccade.selection.clusters.selector import ClusterSelector
from saccade.types import ModelShape

SHAPE = ModelShape(layers=8, query_heads=4, kv_heads=2, head_dim=8)


BUDGETS = st.integers(64, 2**20)
LAYERS = st.none() | st.lists(st.integers(2, 7), max_size=3)
SHARES = st.floats(0, 1, exclude_min=True)
RECTIFY = st.none() | st.builds(saccade.Rectify, st.integers(1, 64), st.sampled_from(["overwrite", "verify"]))
HEADS = st.sampled_from(["kv", "query"])
DENSE_LAYERS = st.integers(0, 2)
ROLES = st.integers(1, 9).map("every:{}".format) | st.sets(st.integers(1, 7)).map(
    lambda layers: "layers:" + "+".join(map(str, [0, *sorted(layers)]))
)
OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "dense": {},
    "streaming": {
        "budget": BUDGETS,
        "sinks": st.integers(0, 16),
        "dense_layers": DENSE_LAYERS,
        "rectify": RECTIFY,
    },
    "quest": {
        "budget": BUDGETS,
        "page": st.integers(1, 64),
        "heads": HEADS,
        "dense_layers": DENSE_LAYERS,
        "chunking": st.just("fixed"),
        "chunk_min": st.none(),
        "chunk_max": st.none(),
        "rectify": RECTIFY,
    },
    "tidal": {
        "budget": BUDGETS,
        "reselect": LAYERS,
        "heads": HEADS,
        "dense_layers": DENSE_LAYERS,
        "rectify": RECTIFY,
    },
    "less_is_more": {
        "budget": BUDGETS,
        "reselect": LAYERS,
        "sinks": st.integers(0, 16),
        "recent": st.floats(0, 1),
        "dense_layers": DENSE_LAYERS,
        "rectify": RECTIFY,
    },
    "exact_topk": {"budget": BUDGETS, "heads": HEADS, "dense_layers": DENSE_LAYERS, "rectify": RECTIFY},
    "lychee_decode": {"budget": BUDGETS, "roles": ROLES, "page": st.just(1), "rectify": RECTIFY},
    "lychee_cluster": {
        "budget": st.integers(1024, 2**20),
        "sinks": st.integers(0, 16),
        "buffer": st.none() | st.integers(64, 128),
        "chunk_min": st.integers(1, 8),
        "chunk_max": st.integers(8, 16),
        "chunking": st.sampled_from(["text", "fixed"]),
        "pooling": st.sampled_from(["mean", "max"]),
        "cluster_size": st.integers(1, 8),
        "coarse": st.sampled_from(["sqrt", "cap64", "root"]),
        "k_g": st.none() | st.integers(1, 64),
        "radius": st.sampled_from(["chunks", "children"]),
        "pack": st.sampled_from(["chunks", "whole"]),
        "dense_layers": DENSE_LAYERS,
        "rectify": RECTIFY,
    },
    "resa": {
        "page": st.integers(1, 64),
        "ratio": SHARES,
        "min_pages": st.integers(8, 64),
        "local_pages": st.integers(1, 8),
        "dense_layers": DENSE_LAYERS,
        "rectify": RECTIFY,
    },
    "composed": {
        "budget": BUDGETS,
        "scorer": st.just("exact"),
        "page": st.none(),
        "chunking": st.none(),
        "chunk_min": st.none(),
        "chunk_max": st.none(),
        "heads": st.none(),
        "pooling": st.none(),
        "roles": st.just("select"),
        "dense_layers": st.none() | DENSE_LAYERS,
        "sinks": st.none(),
        "recent": st.none(),
        "min_pages": st.none(),
        "local_pages": st.none(),
        "rectify": RECTIFY,
    },
}
for _name in ("tidal", "exact_topk", "lychee_decode", "composed"):
    OPTIONS[_name] |= {"rule": st.just("top_k"), "top_p": st.none(), "threshold": st.none(), "ratio": st.none()}

# Options that only fit together; each may come with any of the others.
CUT_WITH: list[dict[str, st.SearchStrategy[Any]]] = [
    {"rule": st.just("top_p"), "top_p": SHARES, "page": st.just(1)},
    {"rule": st.just("threshold"), "threshold": st.floats(0, 1, exclude_min=True, exclude_max=True)},
    {"rule": st.just("ratio"), "ratio": SHARES, "budget": st.none()},
]
PAGED: dict[str, st.SearchStrategy[Any]] = {"page": st.integers(1, 64)}
MIN_PAGES: dict[str, st.SearchStrategy[Any]] = {"min_pages": st.integers(8, 64), "local_pages": st.integers(1, 8)}
CHUNKS: dict[str, st.SearchStrategy[Any]] = {
    "chunking": st.just("text"),
    "chunk_min": st.none() | st.integers(1, 8),
    "chunk_max": st.none() | st.integers(8, 32),
    "page": st.integers(8, 16),
    "budget": st.integers(64, 4096),
}
TOGETHER: dict[str, list[dict[str, st.SearchStrategy[Any]]]] = {
    "quest": [CHUNKS],
    "tidal": [{key: values for key, values in cut.items() if key != "page"} for cut in CUT_WITH],
    "exact_topk": [{key: values for key, values in cut.items() if key != "page"} for cut in CUT_WITH],
    "lychee_decode": [*CUT_WITH, PAGED, {**CUT_WITH[2], **PAGED}],
    "composed": [
        *CUT_WITH,
        {"heads": st.just("query"), **PAGED},
        {"pooling": st.sampled_from(["max", "mean"]), "heads": st.just("kv")},
        {**CUT_WITH[2], **MIN_PAGES, "scorer": st.just("page_bounds"), **PAGED},
        {"rule": st.just("rank_union"), "sinks": st.integers(0, 16), "recent": st.floats(0, 1)},
        {"rule": st.just("rank_union"), "heads": st.just("all"), "dense_layers": st.just(0), "roles": ROLES},
        {
            "scorer": st.just("cluster"),
            "budget": st.integers(256, 4096),
            "pooling": st.just("mean"),
            "chunking": st.none() | st.sampled_from(["fixed", "text"]),
            "chunk_max": st.none() | st.integers(8, 32),
        },
        {"roles": ROLES, "dense_layers": st.just(0)},
        {"roles": st.just("layers:2+5"), "dense_layers": st.just(2), "scorer": st.just("page_bounds")},
        {"scorer": st.just("page_bounds"), **CHUNKS},
    ],
}
NEEDED = {"lychee_decode": {"roles": "every:4"}, "composed": {}}


@st.composite
def policies(draw: st.DrawFn) -> saccade.Policy:
    name = draw(st.sampled_from(sorted(OPTIONS)))
    alone = OPTIONS[name]
    given_names = draw(st.sets(st.sampled_from(sorted(alone)))) if alone else set()
    options = {option: draw(alone[option]) for option in sorted(given_names)}
    together = draw(st.sampled_from([{}, *TOGETHER.get(name, [])]))
    options |= {option: draw(values) for option, values in together.items()}
    if name == "lychee_cluster" and options.get("rectify") and options.get("buffer"):
        options["buffer"] = max(options["buffer"], options["rectify"].every)
    return saccade.policy(name, **{**NEEDED.get(name, {}), **options})


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
        ("less_is_more:budget=256,rectify=32", "less_is_more", {"budget": 256, "rectify": saccade.Rectify(32)}),
        ("tidal:rectify=4:verify", "tidal", {"rectify": {"every": 4, "mode": "verify"}}),
        ("quest:rectify=16", "quest", {"rectify": 16}),
        ("resa", "resa", {"rectify": saccade.Rectify(32, "overwrite")}),
        ("resa:rectify=none", "resa", {"rectify": None}),
        ("resa:rectify=", "resa", {"rectify": None}),
        ("tidal:rule=top_p,top_p=0.9", "tidal", {"rule": "top_p", "top_p": 0.9}),
        ("exact_topk:rule=threshold,threshold=1e-4", "exact_topk", {"rule": "threshold", "threshold": 0.0001}),
        ("lychee_decode:roles=every:04", "lychee_decode", {"roles": "every:4"}),
        ("lychee_decode:roles=/a b/c=d:e.json", "lychee_decode", {"roles": Path("/a b/c=d:e.json")}),
        ("composed:roles=layers:2+05", "composed", {"roles": "layers:2+5"}),
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
    assert list(table) == list(OPTIONS)
    for name, description in table.items():
        assert description.name == name and description.summary and description.source
        assert set(description.defaults) == set(OPTIONS[name]) == set(description.help)
        assert all(description.help.values())
    with pytest.raises(TypeError):
        table["dense"] = None  # type: ignore[index]


def test_defaults_are_the_papers() -> None:
    assert saccade.policies()["less_is_more"].defaults == {
        "budget": 2048, "reselect": None, "sinks": 4, "recent": 0.25, "dense_layers": 2, "rectify": None,
    }  # fmt: skip
    assert saccade.policies()["quest"].defaults == {
        "budget": 2048, "page": 16, "heads": "kv", "dense_layers": 2, "chunking": "fixed", "chunk_min": None,
        "chunk_max": None, "rectify": None,
    }  # fmt: skip
    cut = {"budget": 2048, "rule": "top_k", "top_p": None, "threshold": None, "ratio": None}
    plain = {**cut, "heads": "kv", "dense_layers": 2, "rectify": None}
    assert saccade.policies()["tidal"].defaults == {**plain, "reselect": None}
    assert saccade.policies()["exact_topk"].defaults == plain
    assert saccade.policies()["lychee_decode"].defaults == {**cut, "roles": None, "page": 1, "rectify": None}
    assert saccade.policies()["resa"].defaults == {
        "page": 16, "ratio": 0.1, "min_pages": 16, "local_pages": 1, "dense_layers": 0, "rectify": saccade.Rectify(32),
    }  # fmt: skip
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


@pytest.mark.parametrize("name", ["tidal", "exact_topk", "lychee_decode", "composed"])
def test_a_share_of_the_row_has_no_budget(name: str) -> None:
    policy = saccade.policy(name, rule="ratio", ratio=0.3, **NEEDED.get(name, {}))
    assert policy.budget is None and policy.with_budget(64) is policy
    assert "budget" not in policy.to_spec() and saccade.Policy.from_json(policy.to_json()).with_budget(64) == policy
    varying = saccade.policy(name, rule="top_p", top_p=0.9, **NEEDED.get(name, {}))
    assert varying.with_budget(64).budget == 64, "the buffer's width"
    resa = saccade.policy("resa")
    assert resa.budget is None and resa.with_budget(64) is resa


def test_rectification_is_what_was_asked_for() -> None:
    assert saccade.policy("resa").rectify == saccade.Rectify(every=32, mode="overwrite")
    assert saccade.policy("tidal", rectify="4:verify").rectify == saccade.Rectify(4, "verify")
    assert saccade.policy("tidal").rectify is saccade.policy("dense").rectify is None
    assert saccade.policy("resa", rectify=None).to_spec() == "resa:rectify=none"
    assert saccade.policy("less_is_more", rectify=32).to_spec() == "less_is_more:rectify=32"


SMALLEST = [
    ({"name": "streaming"}, 5),
    ({"name": "streaming", "sinks": 0}, 1),
    ({"name": "quest"}, 16),
    ({"name": "quest", "page": 3}, 3),
    ({"name": "quest", "chunking": "text"}, 21),
    ({"name": "quest", "chunking": "text", "rectify": 32}, 52),
    ({"name": "quest", "chunking": "text", "chunk_max": 9}, 10),
    ({"name": "quest", "chunking": "text", "page": 1}, 2),
    ({"name": "tidal"}, 1),
    ({"name": "less_is_more"}, 6),
    ({"name": "less_is_more", "sinks": 0}, 2),
    ({"name": "less_is_more", "recent": 1.0}, 6),
    ({"name": "exact_topk"}, 1),
    ({"name": "exact_topk", "rule": "top_p", "top_p": 0.9}, 1),
    ({"name": "lychee_decode", "roles": "every:4"}, 1),
    ({"name": "lychee_decode", "roles": "every:4", "page": 64}, 64),
    ({"name": "lychee_cluster"}, 33),
    ({"name": "lychee_cluster", "rectify": 32}, 64),
    ({"name": "composed", "scorer": "page_bounds"}, 16),
    ({"name": "composed", "rule": "rank_union"}, 6),
    ({"name": "composed", "scorer": "cluster"}, 33),
    ({"name": "composed", "scorer": "page_bounds", "chunking": "text"}, 21),
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


BUDGETED = [name for name in OPTIONS if "budget" in OPTIONS[name]]
LAYERED = [name for name in OPTIONS if "dense_layers" in OPTIONS[name]]


@pytest.mark.parametrize(
    "value", [0, -1, -(10**12), math.nan, math.inf, 2.5, "abc", "", "1e3", None, True, [64], "64+64"]
)
@pytest.mark.parametrize("name", BUDGETED)
def test_bad_budget(name: str, value: Any) -> None:
    bad(f"policy {name}", "budget", repr(value), name=name, budget=value, **NEEDED.get(name, {}))


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


@pytest.mark.parametrize("name", LAYERED)
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
        ("resa", "ratio", 0),
        ("resa", "ratio", 1.5),
        ("resa", "ratio", -0.1),
        ("resa", "ratio", math.nan),
        ("resa", "ratio", None),
        ("resa", "ratio", True),
        ("resa", "ratio", "half"),
        ("resa", "min_pages", 0),
        ("resa", "min_pages", None),
        ("resa", "local_pages", 0),
        ("resa", "local_pages", -1),
        ("resa", "local_pages", 17),
        ("resa", "page", 0),
        ("tidal", "rule", "top"),
        ("tidal", "rule", "rank_union"),
        ("exact_topk", "rule", None),
        ("exact_topk", "heads", "all"),
        ("composed", "scorer", "best"),
        ("composed", "page", 0),
        ("composed", "sinks", -1),
        ("composed", "recent", 1.5),
        ("composed", "min_pages", 0),
        ("composed", "local_pages", 2.5),
        ("composed", "roles", None),
        ("composed", "roles", 4),
        ("composed", "roles", "every:0"),
        ("composed", "roles", "layers:"),
        ("composed", "roles", "layers:2+-3"),
        ("lychee_decode", "page", 0),
        ("lychee_decode", "roles", ""),
        ("lychee_decode", "roles", "every:"),
        ("lychee_decode", "roles", "every:0"),
        ("lychee_decode", "roles", "every:-1"),
        ("lychee_decode", "roles", "every:1.5"),
        ("lychee_decode", "roles", "every:²"),
        ("lychee_decode", "roles", ["every:4"]),
        ("lychee_decode", "roles", "a,b.json"),
        ("lychee_decode", "roles", " a.json"),
        ("lychee_decode", "roles", "a\n.json"),
    ],
)
def test_bad_value(name: str, option: str, value: Any) -> None:
    # Numbers that only a rule can judge stand in its message as they are written.
    bad(f"policy {name}", option, repr(value), "is not valid", name=name, **{**NEEDED.get(name, {}), option: value})


@pytest.mark.parametrize("value", [0, -0.5, 1.5, math.nan, math.inf, "much", True, [0.5]])
@pytest.mark.parametrize("rule", ["top_p", "threshold", "ratio"])
@pytest.mark.parametrize("name", ["tidal", "exact_topk", "lychee_decode", "composed"])
def test_bad_value_of_a_rule(name: str, rule: str, value: Any) -> None:
    bad(f"policy {name}: {rule}={value!r}", "is not valid", name=name, rule=rule, **{rule: value})


def test_a_threshold_of_one_takes_nothing() -> None:
    bad("threshold=1", "less than 1", name="tidal", rule="threshold", threshold=1)
    saccade.policy("tidal", rule="top_p", top_p=1)
    saccade.policy("tidal", rule="ratio", ratio=1)


VALUES = ["top_p", "threshold", "ratio"]


@pytest.mark.parametrize("rule", ["top_k", *VALUES])
@pytest.mark.parametrize("option", VALUES)
@pytest.mark.parametrize("name", ["tidal", "exact_topk", "lychee_decode", "composed"])
def test_an_option_of_another_rule(name: str, option: str, rule: str) -> None:
    own = {rule: 0.5} if rule in VALUES else {}
    if option != rule:
        words = f"{option}=0.5 belongs to rule={option}", f"the rule is {rule}"
        bad(f"policy {name}", *words, name=name, rule=rule, **{**NEEDED.get(name, {}), **own, option: 0.5})
    else:
        bad(f"policy {name}: rule={rule} needs its value", name=name, rule=rule, **NEEDED.get(name, {}))


@pytest.mark.parametrize("name", ["tidal", "exact_topk", "lychee_decode", "composed"])
def test_a_ratio_takes_no_budget(name: str) -> None:
    words = "budget=2048 is not valid", "no budget"
    bad(f"policy {name}", *words, name=name, rule="ratio", ratio=0.1, budget=2048, **NEEDED.get(name, {}))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, ("every=0", "at least 1")),
        (-4, ("every=-4",)),
        (2.5, ("every=2.5",)),
        (True, ("every=True",)),
        ("0", ("every=0",)),
        ("many", ("every='many'",)),
        ("4:draft", ("mode='draft'", "overwrite or verify")),
        ("4:", ("mode=''",)),
        (":verify", ("every=''",)),
        ({"every": 4, "each": 5}, ("unknown key 'each'", "every, mode")),
        ({"mode": "never"}, ("mode='never'",)),
        ([4], ("every=[4]",)),
    ],
)
@pytest.mark.parametrize("name", [name for name in OPTIONS if "rectify" in OPTIONS[name]])
def test_bad_rectify(name: str, value: Any, words: tuple[str, ...]) -> None:
    bad(f"policy {name}: rectify=", *words, name=name, rectify=value, **NEEDED.get(name, {}))


def test_lychee_decode_needs_roles() -> None:
    bad(
        "lychee_decode needs a role file: make one with `saccade calibrate heads --model ...`", "roles=every:4",
        name="lychee_decode",
    )  # fmt: skip


def test_every_nth_layer_is_a_stand_in_and_says_so() -> None:
    plan = saccade.policy("lychee_decode", roles="every:3").plan(SHAPE)
    assert [layer[0].value for layer in plan.roles.layers] == ["publish", "reuse", "reuse"] * 2 + ["publish", "reuse"]
    assert "nobody calibrated" in plan.notes[0]
    plan = saccade.policy("composed", roles="every:3").plan(SHAPE)
    assert [layer[0].value for layer in plan.roles.layers[:6]] == ["dense"] * 2 + [
        "publish",
        "reuse",
        "reuse",
        "publish",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sinks": 3}, ("sinks=3 belongs to rule=rank_union", "the rule is top_k")),
        ({"recent": 0.5, "rule": "ratio", "ratio": 0.5}, ("recent=0.5 belongs to rule=rank_union", "rule is ratio")),
        ({"min_pages": 3}, ("min_pages=3 belongs to rule=ratio",)),
        ({"local_pages": 3, "rule": "rank_union"}, ("local_pages=3 belongs to rule=ratio", "rule is rank_union")),
        ({"local_pages": 3, "min_pages": 2, "rule": "ratio", "ratio": 0.5}, ("local_pages=3", "min_pages, which is 2")),
        ({"rule": "rank_union", "page": 4}, ("rank_union needs scorer=exact and page=1",)),
        ({"rule": "rank_union", "scorer": "page_bounds"}, ("rank_union needs scorer=exact",)),
        ({"rule": "rank_union", "heads": "kv"}, ("heads=kv does not fit rule=rank_union", "one set for all heads")),
        ({"heads": "all"}, ("heads=all needs rule=rank_union",)),
        ({"heads": "query", "pooling": "mean"}, ("pooling=mean needs heads=kv",)),
        ({"rule": "rank_union", "pooling": "max"}, ("pooling=max needs heads=kv",)),
        ({"rule": "top_p", "top_p": 0.5, "scorer": "page_bounds"}, ("rule=top_p needs scorer=exact", "probabilities")),
        ({"rule": "threshold", "threshold": 0.5, "page": 2}, ("rule=threshold", "a page of 2 tokens")),
        ({"scorer": "cluster", "rule": "ratio", "ratio": 0.1}, ("rule=ratio does not fit scorer=cluster", "top_k")),
        ({"scorer": "cluster", "rule": "top_p", "top_p": 0.1}, ("rule=top_p does not fit scorer=cluster",)),
        ({"scorer": "cluster", "rule": "rank_union"}, ("rule=rank_union does not fit scorer=cluster",)),
        ({"scorer": "cluster", "page": 16}, ("page=16 does not fit scorer=cluster",)),
        ({"scorer": "cluster", "heads": "query"}, ("heads=query does not fit scorer=cluster", "heads=kv")),
        ({"scorer": "cluster", "pooling": "max"}, ("pooling=max does not fit scorer=cluster", "pooling=mean")),
        ({"roles": "f.json", "dense_layers": 2}, ("dense_layers=2 does not fit roles=f.json",)),
        ({"chunking": "text"}, ("chunking=text needs scorer=page_bounds or scorer=cluster", "not exact")),
        ({"chunking": "fixed"}, ("chunking=fixed needs scorer=page_bounds or scorer=cluster", "not exact")),
        (
            {"chunking": "text", "scorer": "page_bounds", "rule": "ratio", "ratio": 0.1},
            ("rule=ratio does not fit chunking=text", "only rule=top_k"),
        ),
        ({"scorer": "page_bounds", "chunk_max": 8}, ("chunk_max=8 belongs to chunking=text", "chunking is fixed")),
    ],
)
def test_what_makes_no_sense_together(options: dict[str, Any], words: tuple[str, ...]) -> None:
    bad("policy composed: ", *words, name="composed", **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_min": 8}, ("chunk_min=8 belongs to chunking=text", "chunking is fixed")),
        ({"chunk_max": 8, "chunking": "fixed"}, ("chunk_max=8 belongs to chunking=text",)),
        ({"chunk_min": 9, "chunk_max": 8, "chunking": "text"}, ("chunk_min=9 does not fit chunk_max=8", "1 to 8")),
        ({"chunk_min": 25, "chunking": "text"}, ("chunk_min=25 does not fit chunk_max=20", "1 to 20")),
        ({"chunk_max": 0, "chunking": "text"}, ("chunk_max=0 is not valid",)),
        ({"chunking": "lines"}, ("chunking='lines' is not valid", "'fixed' or 'text'")),
    ],
)
def test_quests_chunks_fit_together(options: dict[str, Any], words: tuple[str, ...]) -> None:
    bad("policy quest: ", *words, name="quest", **options)


@pytest.mark.parametrize("rule", ["top_p", "threshold"])
def test_lychee_decodes_pages_have_no_probability(rule: str) -> None:
    words = f"rule={rule} needs exact scores of single tokens", "a page of 64 tokens"
    bad("policy lychee_decode: ", *words, name="lychee_decode", roles="every:4", page=64, rule=rule, **{rule: 0.5})


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ("layers:3", ("roles=layers:3", "layer 2, the first after the dense ones")),
        ("layers:2+8", ("layer 8 is not one of 2 to 7",)),
        ("layers:1+2", ("layer 1 is not one of 2 to 7",)),
        ("every", ("role file every cannot be read",)),
    ],
)
def test_roles_that_do_not_fit_the_model(roles: str, words: tuple[str, ...]) -> None:
    with pytest.raises(saccade.PolicyError) as error:
        saccade.policy("composed", roles=roles).plan(SHAPE)
    check_line(str(error.value), words)


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
        ("dense:rectify=4", ("policy dense has no option 'rectify'", "none")),
        ("resa:budget=64", ("policy resa has no option 'budget'", "min_pages")),
        ("tidal:rectify=4:verify:now", ("rectify", "mode='verify:now'")),
        ("tidal:budget=none,rule=ratio,ratio=0.5", ("budget", "'none'")),
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
        (json.dumps({**VALID, "options": {"rectify": {"every": 4, "seldom": 1}}}), ("rectify", "unknown key 'seldom'")),
        (json.dumps({**VALID, "options": {"rectify": {"every": math.nan}}}), ("rectify", "every=nan")),
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
        st.sampled_from(sorted({option for options in OPTIONS.values() for option in options})),
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


def test_composed_cluster_takes_its_chunks_from_the_options() -> None:
    shape = ModelShape(layers=6, query_heads=4, kv_heads=2, head_dim=8)
    for chunking, sizes in (("fixed", (4, 12)), ("text", (8, 16))):
        options = {"chunking": chunking, "chunk_min": sizes[0], "chunk_max": sizes[1]}
        selector = saccade.policy("composed", scorer="cluster", budget=256, **options).plan(shape).selector
        assert isinstance(selector, ClusterSelector)
        assert (selector.chunking, selector.chunk_min, selector.chunk_max) == (chunking, *sizes)
    default = saccade.policy("composed", scorer="cluster", budget=256).plan(shape).selector
    assert isinstance(default, ClusterSelector) and default.chunking == "text"
