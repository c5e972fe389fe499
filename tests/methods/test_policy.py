"""Policies as data: spec strings, JSON both ways, defaults, budgets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

import saccade
from saccade.types import ModelShape, Role

from .drawing import NEEDED, OPTIONS, SHAPE, policies

# --- round trips -------------------------------------------------------------------------------------------------


@given(policies())
def test_round_trips(policy: saccade.Policy) -> None:
    again = saccade.Policy.from_json(policy.to_json())
    assert again == policy == saccade.Policy.from_spec(policy.to_spec()) == saccade.Policy.from_spec(str(policy))
    assert hash(policy) == hash(again) and policy.plan(SHAPE) == again.plan(SHAPE)
    data = json.loads(policy.to_json())
    assert sorted(data) == ["name", "options", "version"]
    assert set(data["options"]) == set(OPTIONS[policy.name])


SPECS: dict[str, dict[str, Any]] = {
    "quest: budget=64 , page=8,": {"budget": 64, "page": 8},
    "tidal:reselect=12+20": {"reselect": [12, 20]},
    "tidal:reselect=12": {"reselect": 12},
    "tidal:reselect=": {"reselect": []},
    "less_is_more:budget=256,rectify=32": {"budget": 256, "rectify": saccade.Rectify(32)},
    "tidal:rectify=4:verify": {"rectify": {"every": 4, "mode": "verify"}},
    "resa:rectify=": {"rectify": None},
    "exact_topk:rule=threshold,threshold=1e-4": {"rule": "threshold", "threshold": 0.0001},
    "lychee_decode:roles=every:04": {"roles": "every:4"},
    "lychee_decode:roles=/a b/c=d:e.json": {"roles": Path("/a b/c=d:e.json")},
    "composed:roles=layers:2+05": {"roles": "layers:2+5"},
}


def test_spec_is_the_python_call() -> None:
    read = {spec: (saccade.Policy.from_spec(spec), saccade.policy(spec.strip())) for spec in SPECS}
    assert read == {spec: (saccade.policy(spec.partition(":")[0], **options),) * 2 for spec, options in SPECS.items()}


def test_a_spec_takes_further_options_but_none_twice() -> None:
    assert saccade.policy("tidal:budget=64", reselect=[3, 5]) == saccade.policy("tidal", budget=64, reselect=[3, 5])
    with pytest.raises(saccade.PolicyError, match=r"policy spec 'tidal:budget=64': option 'budget' is given twice"):
        saccade.policy("tidal:budget=64", budget=128)


# --- the mapping of policies -------------------------------------------------------------------------------------


def test_policies_is_a_mapping_of_descriptions() -> None:
    table = saccade.policies()
    for name, description in table.items():
        assert description.name == name and description.summary and description.source
        assert set(description.defaults) == set(description.help)
        assert all(description.help.values())
    with pytest.raises(TypeError):
        table["dense"] = None  # type: ignore[index]


def test_two_layers_are_dense_unless_every_layer_of_a_few_chooses() -> None:
    def dense(name: str, shape: ModelShape, **options: int) -> list[int]:
        roles = saccade.policy(name, **options).plan(shape).roles.layers
        return [layer for layer, each in enumerate(roles) if Role.DENSE in each]

    plain = ModelShape(layers=8, query_heads=4, kv_heads=2, head_dim=64)
    mixed = replace(plain, kinds=("sliding_attention", "full_attention") * 4, window=64)
    found = {
        name: (dense(name, plain), dense(name, mixed), dense(name, plain, dense_layers=1))
        for name in ("quest", "tidal", "less_is_more", "lychee_cluster", "exact_topk", "composed")
    }
    few = dict.fromkeys(("tidal", "less_is_more"), ([0, 1], [1, 3], [0]))
    assert found == {**dict.fromkeys(found, ([0, 1], [], [0])), **few}
    assert [dense(name, mixed, dense_layers=2) for name in found] == [[1, 3]] * len(found)


PUBLISHED: dict[str, dict[str, Any]] = {
    "streaming": {"sinks": 4},
    "quest": {"page": 16, "min_pages": 1, "keep_last": True, "heads": "kv", "dense_layers": None},
    "tidal": {"rule": "top_k", "heads": "kv", "dense_layers": 2, "sinks": None, "window": None},
    "exact_topk": {"rule": "top_k", "heads": "kv", "dense_layers": None},
    "less_is_more": {"sinks": 4, "recent": 0.25, "dense_layers": 2, "reselect": None},
    "lychee_decode": {"rule": "top_k", "roles": None, "page": 1, "sinks": None, "window": None},
    "resa": {"page": 16, "ratio": 0.1, "min_pages": 16, "local_pages": 1, "dense_layers": 0},
}


def test_defaults_are_the_papers() -> None:
    defaults = {name: saccade.policies()[name].defaults for name in PUBLISHED}
    rest = {name: {"budget": 2048, "rectify": None} for name in PUBLISHED} | {"resa": {"rectify": saccade.Rectify(32)}}
    assert defaults == {name: {**defaults[name], **own, **rest[name]} for name, own in PUBLISHED.items()}


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


@pytest.mark.parametrize("name", ["tidal", "lychee_decode"])
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
    assert saccade.policy("quest", keep_last=False).to_spec() == "quest:keep_last=false"
    assert saccade.policy("resa", rectify=None).to_spec() == "resa:rectify=none"
    assert saccade.policy("less_is_more", rectify=32).to_spec() == "less_is_more:rectify=32"


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        ("lychee_cluster", ("form", "chunking", "pooling", "cluster_size", "spread"), {"form": "paper"}),
        ("lychee_decode", ("sinks", "window"), {"sinks": 0, "window": 0}),
    ],
)
def test_what_was_written_before_options_came_means_what_it_meant(
    name: str, before: tuple[str, ...], now: dict[str, Any]
) -> None:
    needed = {"roles": "every:4"} if name == "lychee_decode" else {}
    written = saccade.policy(name, **needed).to_dict()
    written["options"] = {key: value for key, value in written["options"].items() if key not in before}
    written["options"]["gone"] = None  # was never given, and there is none of that name any more
    read = saccade.Policy.from_dict(written)
    assert {key: getattr(read.options, key) for key in now} == now
    # Written by hand, with a few options, it is today's.
    assert saccade.Policy.from_dict({**written, "options": needed}).options == saccade.policy(name, **needed).options
