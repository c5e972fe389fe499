"""One clear line for every option that is not valid, alone or with others."""

import math
import re
from typing import Any

import pytest

import saccade
from one_line import lacking

from .drawing import NEEDED, OPTIONS, SHAPE
from .refusing import bad, check_line, line_of, refusal

SMALLEST = {
    "streaming": 5,
    "quest": 16,
    "quest:min_pages=3,keep_last=false": 1,
    "less_is_more": 6,
    "tidal:sinks=4,window=8": 12,
    "exact_topk:sinks=4,rule=top_p,top_p=0.9": 5,
    "lychee_decode:roles=every:4,page=64": 64,
    "lychee_decode:roles=every:4,sinks=65,window=2,page=64": 192,
    "lychee_cluster": 48,
    "lychee_cluster:rectify=32": 80,
    "token_clusters": 25,
    "token_clusters:rectify=32,cluster_size=16": 65,
    "composed:scorer=page_bounds,sinks=1": 32,
}


def test_smallest_legal_budget() -> None:
    """The smallest works; one less is an error that names it."""
    assert {spec: line for spec, budget in SMALLEST.items() if (line := refusal(spec, budget=budget))} == {}
    less = ((line_of(saccade.policy, spec, budget=budget - 1), (str(budget),)) for spec, budget in SMALLEST.items())
    assert lacking(less) == []


TELLING: dict[str, tuple[Any, ...]] = {
    "budget": (True, 0, None),
    "reselect": ([True], [-1]),
    "recent": (True, 1.001, -0.001),
    "spread": (True, 4.5, -0.1),
    "rectify": (True, 0),
    "roles": ("a,b.json", 4),
    "keep_last": ("perhaps",),
    **dict.fromkeys(("page", "min_pages", "local_pages", "buffer", "replant", "chunk_min", "chunk_max"), (True, 0)),
    **dict.fromkeys(("cluster_size", "group"), (True, 0, 2**20)),
    **dict.fromkeys(("sinks", "window", "dense_layers"), (True, -1)),
    **dict.fromkeys(("top_p", "threshold", "ratio"), (True, 0, 1.5)),
    **dict.fromkeys(("heads", "rule", "form", "chunking", "pooling", "scorer"), ("best", 1)),
}
"""Values that tell the type of an option from plain numbers and text."""


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_of_its_type(name: str) -> None:
    given = [(option, value) for option in OPTIONS[name] for value in TELLING[option]]
    lines = [(option, value, refusal(name, **{**NEEDED.get(name, {}), option: value})) for option, value in given]
    taken = [one for one in lines if not re.match(f"policy {name}: {one[0]}=.* is not valid: ", one[2])]
    assert taken == []


def test_bad_reselect() -> None:
    lines = (line_of(saccade.policy, "tidal", reselect=value) for value in ("x", 1.5, ["x"], "3+x", "3-4"))
    assert lacking((line, ("policy tidal: reselect=", "is not valid")) for line in lines) == []


@pytest.mark.parametrize(("name", "layer"), [("tidal", 1), ("less_is_more", 8)])
def test_reselect_out_of_the_models_range(name: str, layer: int) -> None:
    """Known only once there is a model: under the dense layers, or beyond the last."""
    words = f"policy {name}", f"reselect={layer}", "valid layers are 2 to 7"
    check_line(refusal(name, reselect=[3, layer]), words)


@pytest.mark.parametrize("spec", ["quest", "composed:roles=layers:2"])
def test_no_layer_left_to_select_at(spec: str) -> None:
    with pytest.raises(saccade.PolicyError, match=r"dense_layers=8.*0 to 7 are valid"):
        saccade.policy(spec, dense_layers=8).plan(SHAPE)


def test_unset_reselect_takes_the_middle_layer_and_says_so() -> None:
    guess, named, none = map(saccade.policy, ("tidal:budget=9", "tidal:budget=9,reselect=4", "tidal:reselect="))
    plan, told = guess.plan(SHAPE), named.plan(SHAPE)
    assert plan.roles == told.roles and guess.settled(SHAPE) == named == named.settled(SHAPE)
    assert "L//2 = 4 of 8" in plan.notes[0] and told.notes == ()
    assert [one.plan(SHAPE).guessed for one in (guess, named, none)] == ["reselect", None, None]


# Each type once.
NOT_VALID = {
    "less_is_more: budget": [-(10**12), math.nan, math.inf, 2.5, "abc", "", "1e3", [64], "64+64"],
    "less_is_more: recent": [25, math.nan, math.inf, "abc", "", None, [0.5]],
    "tidal: rule": ["top", "rank_union", None],
    "tidal: top_p": [-0.5, math.nan, math.inf, "much", [0.5]],
    "tidal: threshold": [1],
    "resa: ratio": [None],
    "resa: local_pages": [17],
    "lychee_cluster: cluster_size": [9],
    "token_clusters: cluster_size": [64],
    "token_clusters: group": [64],
    "composed: scorer": ["cluster"],
    "composed: roles": [None, "every:0", "layers:", "layers:2+-3"],
    "lychee_decode: roles": ["", "every:", "every:1.5", "every:٣", ["every:4"], " a.json", "a\n.json"],
}


@pytest.mark.parametrize("what", NOT_VALID)
def test_bad_value(what: str) -> None:
    name, option = what.split(": ")
    needed = NEEDED.get(name, {})
    lines = {repr(value): line_of(saccade.policy, name, **{**needed, option: value}) for value in NOT_VALID[what]}
    # Numbers that only a rule can judge stand in its message as they are written.
    assert lacking((lines[value], (f"policy {name}", option, value, "is not valid")) for value in lines) == []


def test_what_is_no_whole_number_is_said_to_be_none() -> None:
    for value in (2.5, [64]):
        bad(f"policy quest: budget={value} is not valid: must be a whole number", name="quest", budget=value)
    assert saccade.policy("quest", budget=64.0) == saccade.policy("quest", budget=64)


def test_the_largest_share_is_all() -> None:
    saccade.policy("tidal", rule="top_p", top_p=1)
    saccade.policy("tidal", rule="ratio", ratio=1)


VALUES = ["top_p", "threshold", "ratio"]


@pytest.mark.parametrize("option", VALUES)
def test_an_option_of_another_rule(option: str) -> None:
    bad(f"policy tidal: rule={option} needs its value", name="tidal", rule=option)
    for rule in {"top_k", *VALUES} - {option}:
        own = {rule: 0.5} if rule in VALUES else {}
        words = f"{option}=0.5 belongs to rule={option}", f"the rule is {rule}"
        bad("policy tidal", *words, name="tidal", rule=rule, **{**own, option: 0.5})


@pytest.mark.parametrize("name", ["exact_topk", "lychee_decode", "composed"])
def test_every_method_with_rules_asks_for_their_values(name: str) -> None:
    needed = NEEDED.get(name, {})
    bad(f"policy {name}: rule=top_p needs its value", name=name, rule="top_p", **needed)
    words = "budget=2048 is not valid", "no budget"
    bad(f"policy {name}", *words, name=name, rule="ratio", ratio=0.1, budget=2048, **needed)


def test_bad_rectify() -> None:
    refused: list[tuple[Any, tuple[str, ...]]] = [
        (-4, ("every=-4", "at least 1")),
        (2.5, ("every=2.5",)),
        ("٣", ("every='٣'",)),
        ("4:draft", ("mode='draft'", "overwrite or verify")),
        ("4:", ("mode=''",)),
        (":verify", ("every=''",)),
        ({"every": 4, "each": 5}, ("unknown key 'each'", "every, mode")),
        ([4], ("every=[4]",)),
    ]
    lines = ((line_of(saccade.policy, "quest", rectify=value), words) for value, words in refused)
    assert lacking((line, ("policy quest: rectify=", *words)) for line, words in lines) == []


def test_lychee_decode_needs_roles() -> None:
    words = "it needs a role file: make one with `saccade calibrate heads --model ...`", "roles=every:4"
    bad("policy lychee_decode: ", *words, name="lychee_decode")


def test_every_nth_layer_is_a_stand_in_and_says_so() -> None:
    plan = saccade.policy("lychee_decode", roles="every:3").plan(SHAPE)
    assert [layer[0].value for layer in plan.roles.layers] == ["publish", "reuse", "reuse"] * 2 + ["publish", "reuse"]
    assert "nobody calibrated" in plan.notes[0]
    plan = saccade.policy("composed", roles="every:3").plan(SHAPE)
    roles = ["dense", "dense", "publish", "reuse", "reuse", "publish"]
    assert [layer[0].value for layer in plan.roles.layers[:6]] == roles


BOUNDS = {"scorer": "page_bounds"}


SENSELESS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"window": 3, "rule": "rank_union"}, ("window=3 does not fit rule=rank_union", "recent")),
    ({"recent": 0.5, "rule": "ratio", "ratio": 0.5}, ("recent=0.5 belongs to rule=rank_union", "rule is ratio")),
    ({"min_pages": 3}, ("min_pages=3 belongs to rule=ratio",)),
    ({"local_pages": 3, "rule": "rank_union"}, ("local_pages=3 belongs to rule=ratio", "rule is rank_union")),
    ({"local_pages": 3, "min_pages": 2, "rule": "ratio", "ratio": 0.5}, ("local_pages=3", "min_pages, which is 2")),
    ({"rule": "rank_union", "page": 4, "budget": 11}, ("rank_union's pages of 4", "smallest is 12")),
    ({"rule": "rank_union", **BOUNDS, "sinks": 20, "budget": 63}, ("rank_union's pages of 16", "smallest is 64")),
    ({"rule": "top_p", "top_p": 0.5, "pooling": "mass"}, ("pooling=mass does not fit rule=top_p",)),
    ({"rule": "rank_union", "heads": "kv"}, ("heads=kv does not fit rule=rank_union", "one set for all heads")),
    ({"heads": "all"}, ("heads=all needs rule=rank_union",)),
    ({"heads": "query", "pooling": "mean"}, ("pooling=mean needs heads=kv",)),
    ({"rule": "rank_union", "pooling": "max"}, ("pooling=max needs heads=kv",)),
    ({"pooling": "random", "seed": 3}, ("pooling='random' is not valid: it is the method random_head of `claims`",)),
    ({"rule": "top_p", "top_p": 0.5, **BOUNDS}, ("rule=top_p needs scorer=exact", "probabilities")),
    ({"rule": "threshold", "threshold": 0.5, "page": 2}, ("rule=threshold", "a page of 2 tokens")),
    ({"roles": "f.json", "dense_layers": 2}, ("dense_layers=2 does not fit roles=f.json",)),
]


def test_what_makes_no_sense_together() -> None:
    lines = ((line_of(saccade.policy, "composed", **options), words) for options, words in SENSELESS)
    assert lacking((line, ("policy composed: ", *words)) for line, words in lines) == []


def test_roles_that_do_not_fit_the_model() -> None:
    refused = {
        "layers:3": ("roles=layers:3", "layer 2, the first after the dense ones"),
        "layers:2+8": ("layer 8 is not a selection layer", "2 to 7"),
        "layers:1+2": ("layer 1 is not a selection layer", "2 to 7"),
        "every": ("role file every cannot be read",),
    }
    assert lacking((refusal("composed", roles=roles), words) for roles, words in refused.items()) == []


def test_bad_choice_names_the_valid_ones() -> None:
    bad("heads='each'", "'kv' or 'query'", name="quest", heads="each")


@pytest.mark.parametrize("name", ["dense", "quest"])
def test_unknown_option_names_the_valid_ones(name: str) -> None:
    bad(f"policy {name} has no option 'budgets'", *(OPTIONS[name] or ["none"]), name=name, budgets=64)


def test_unknown_policy_names_the_valid_ones() -> None:
    bad("unknown policy 'que st'", *OPTIONS, name="que st")


OF_CLUSTERS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "lychee_cluster": [
        ({"pooling": "max"}, "pooling=max belongs to form=paper"),
        ({"cluster_size": 2}, "cluster_size=2 belongs to form=paper"),
        ({"replant": 64}, "replant=64 belongs to form=paper"),
        ({"chunk_min": 9, "chunk_max": 8}, "chunk_max=8 is not valid; the smallest is 9"),
        ({"form": "paper", "spread": 2}, "spread=2 belongs to form=mass, but the form is paper"),
    ],
    "token_clusters": [
        ({"cluster_size": 12}, "cluster_size=12 is not valid; it must be a power of two"),
        ({"group": 1000}, "group=1000 is not valid; it must be a power of two"),
        ({"buffer": 24}, "buffer=24 is not valid; it must be a power of two"),
        ({"buffer": 256, "group": 128}, "buffer=256 is not valid: 8 (a cluster) to 128 (a group) are"),
        ({"buffer": 8, "cluster_size": 16}, "buffer=8 is not valid: 16 (a cluster) to 2048 (a group) are"),
    ],
}
"""Options of the other form, and sizes that do not fit."""


@pytest.mark.parametrize("name", OF_CLUSTERS)
def test_options_of_clusters_that_do_not_fit(name: str) -> None:
    lines = ((line_of(saccade.policy, name, **options), words) for options, words in OF_CLUSTERS[name])
    assert lacking((line, (f"policy {name}: ", words)) for line, words in lines) == []


def test_lychee_decodes_pages_fit_the_budget_and_have_no_probability() -> None:
    bad("budget=63 does not hold one page of 64", name="lychee_decode", roles="every:4", page=64, budget=63)
    words = "rule=top_p needs exact scores of single tokens", "a page of 64 tokens"
    bad("policy lychee_decode: ", *words, name="lychee_decode", roles="every:4", page=64, rule="top_p", top_p=0.5)
