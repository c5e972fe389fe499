"""One clear line for every option that is not valid, alone or with others, and for text that writes no policy."""

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from one_line import lacking

from .drawing import NEEDED, OPTIONS, SHAPE
from .refusing import check_line, line_of, refusal

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


def test_numbers_that_are_valid() -> None:
    assert saccade.policy("quest", budget=64.0) == saccade.policy("quest", budget=64)
    for rule in ("top_p", "ratio"):
        saccade.policy("tidal", **{"rule": rule, rule: 1})  # the largest share is all


VALUES = ["top_p", "threshold", "ratio"]


@pytest.mark.parametrize("option", VALUES)
def test_an_option_of_another_rule(option: str) -> None:
    expect_lines([("tidal", {"rule": option}, (f"rule={option} needs its value",))])
    for rule in {"top_k", *VALUES} - {option}:
        own = {rule: 0.5} if rule in VALUES else {}
        words = f"{option}=0.5 belongs to rule={option}", f"the rule is {rule}"
        expect_lines([("tidal", {"rule": rule, **own, option: 0.5}, words)])


def test_every_nth_layer_is_a_stand_in_and_says_so() -> None:
    plan = saccade.policy("lychee_decode", roles="every:3").plan(SHAPE)
    assert [layer[0].value for layer in plan.roles.layers] == ["publish", "reuse", "reuse"] * 2 + ["publish", "reuse"]
    assert "nobody calibrated" in plan.notes[0]
    plan = saccade.policy("composed", roles="every:3").plan(SHAPE)
    roles = ["dense", "dense", "publish", "reuse", "reuse", "publish"]
    assert [layer[0].value for layer in plan.roles.layers[:6]] == roles


BOUNDS = {"scorer": "page_bounds"}
PAGES = {**NEEDED["lychee_decode"], "page": 64}
Refused = tuple[str, dict[str, Any], tuple[str, ...]]
"""A method, its options, and what its line says behind `policy <method>`."""
REFUSED: list[Refused] = [
    ("quest", {"heads": "each"}, ("heads='each'", "'kv' or 'query'")),
    ("quest", {"budgets": 64}, ("policy quest has no option 'budgets'", *OPTIONS["quest"])),
    ("dense", {"budgets": 64}, ("policy dense has no option 'budgets'", "none")),
    ("quest", {"budget": 2.5}, ("budget=2.5 is not valid: must be a whole number",)),
    ("quest", {"budget": [64]}, ("budget=[64] is not valid: must be a whole number",)),
    (
        "lychee_decode",
        {},
        ("it needs a role file: make one with `saccade calibrate heads", "roles=every:4"),
    ),
    ("lychee_decode", {**PAGES, "budget": 63}, ("budget=63 does not hold one page of 64",)),
    ("lychee_decode", {**PAGES, "rule": "top_p", "top_p": 0.5}, ("rule=top_p needs exact scores of single", "of 64")),
    *(("tidal", {"reselect": value}, ("reselect=", "is not valid")) for value in ("x", 1.5, ["x"], "3+x", "3-4")),
]
WITH_RULES = {name: NEEDED.get(name, {}) for name in ("exact_topk", "lychee_decode", "composed")}
SHARE = {"rule": "ratio", "ratio": 0.1, "budget": 2048}
REFUSED += [(name, {"rule": "top_p", **own}, ("rule=top_p needs its value",)) for name, own in WITH_RULES.items()]
REFUSED += [(name, SHARE | own, ("budget=2048 is not valid", "no budget")) for name, own in WITH_RULES.items()]
OF_A_MODEL: list[Refused] = [
    # Known only once there is a model: under the dense layers, or beyond the last.
    ("tidal", {"reselect": [3, 1]}, ("reselect=1", "valid layers are 2 to 7")),
    ("less_is_more", {"reselect": [3, 8]}, ("reselect=8", "valid layers are 2 to 7")),
    ("quest", {"dense_layers": 8}, ("dense_layers=8", "0 to 7 are valid")),
    ("composed", {"dense_layers": 8, "roles": "layers:2"}, ("dense_layers=8", "0 to 7 are valid")),
    ("composed", {"roles": "layers:3"}, ("roles=layers:3", "layer 2, the first after the dense ones")),
    ("composed", {"roles": "layers:2+8"}, ("layer 8 is not a selection layer", "2 to 7")),
    ("composed", {"roles": "layers:1+2"}, ("layer 1 is not a selection layer", "2 to 7")),
    ("composed", {"roles": "every"}, ("role file every cannot be read",)),
]
RECTIFY: list[tuple[Any, tuple[str, ...]]] = [
    (-4, ("every=-4", "at least 1")),
    (2.5, ("every=2.5",)),
    ("٣", ("every='٣'",)),
    ("4:draft", ("mode='draft'", "overwrite or verify")),
    ("4:", ("mode=''",)),
    (":verify", ("every=''",)),
    ({"every": 4, "each": 5}, ("unknown key 'each'", "every, mode")),
    ([4], ("every=[4]",)),
]
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


def chosen(name: str, **options: Any) -> str:
    return line_of(saccade.policy, name, **options)


def expect_lines(refused: Iterable[Refused], of: Callable[..., str] = chosen) -> None:
    """The policy is refused in one line; with `refusal` it may be its plan."""
    assert lacking((of(name, **given), (f"policy {name}", *words)) for name, given, words in refused) == []


def test_options_that_are_not_valid_alone_or_together() -> None:
    expect_lines(REFUSED)
    expect_lines(OF_A_MODEL, refusal)
    expect_lines(("quest", {"rectify": value}, ("policy quest: rectify=", *words)) for value, words in RECTIFY)
    expect_lines(("composed", given, words) for given, words in SENSELESS)
    expect_lines((name, given, (words,)) for name, rows in OF_CLUSTERS.items() for given, words in rows)


SPECS: dict[str, tuple[str, ...]] = {
    "que st": ("unknown policy 'que st'", *OPTIONS),
    "": ("unknown policy ''", "quest"),
    "quest:budget=64,budget=128": ("'budget' is given twice",),
    "quest:=64": ("policy quest has no option ''",),
    "quest:budget==64": ("budget", "'=64'"),
    "tidal:reselect=3,4": ("'4' is not key=value", "lists with +"),
    "Less-Is-More": ("unknown policy 'Less-Is-More'", "did you mean less_is_more?"),
    "tidaldecode": ("did you mean tidal?",),
    "tidal:Budgt=3": ("no option 'Budgt'", "did you mean budget?"),
    "tidal:budget=1k": ("budget='1k' is not valid: must be a whole number",),
    "tidal:budget=0": ("budget='0' is not valid: must be at least 1",),
    "less_is_more:recent=1.5": ("recent='1.5' is not valid: must be at most 1",),
    "quest:rectify=4:{x}": ("mode='{x}' is not valid",),
    "auto": ("unknown policy 'auto'", "recipes are for decoding", "saccade.sparsify"),
    "recipe:qwen3-8b": ("unknown policy 'recipe'", "recipes are for decoding", "saccade.sparsify"),
    "found.json": ("unknown policy 'found.json'", "recipes are for decoding", "saccade.sparsify"),
    "tidal:reselect=3+": ("reselect", "''"),
    "tidal:rectify=4:verify:now": ("rectify", "mode='verify:now'"),
    "quest:budget=64\npage=4": ("budget",),
}


def test_bad_spec() -> None:
    assert lacking((line_of(saccade.Policy.from_spec, spec), words) for spec, words in SPECS.items()) == []


def test_blanks_around_words_mean_nothing() -> None:
    for spec in (" tidal : budget = 64 ,", "tidal:\tbudget =64, \n"):
        assert saccade.policy(spec) == saccade.Policy.from_spec(spec) == saccade.policy("tidal", budget=64)


def test_a_policy_is_named_by_text() -> None:
    name: Any = ("tidal",)
    check_line(line_of(saccade.policy, name), (f"policy={name!r}", "'tidal:budget=64'"))


VALID = {"version": 1, "name": "quest", "options": {"budget": 64}}


DOCUMENTS: dict[str, tuple[str, ...]] = {
    "{": ("cannot be read",),
    "[" * 100_000: ("cannot be read",),
    '{"version": 1' + "0" * 5000 + "}": ("cannot be read",),
    "[]": ("exactly the keys name, options, version",),
    json.dumps({**VALID, "extra": 1}): ("exactly the keys",),
    json.dumps({"name": "quest", "options": {}}): ("exactly the keys",),
    json.dumps({**VALID, "version": 2}): ("version 2", "reads version 1"),
    json.dumps({**VALID, "version": True}): ("version True",),
    json.dumps({**VALID, "name": 3}): ("name=3",),
    json.dumps({**VALID, "options": []}): ("exactly the keys", "options"),
    json.dumps({**VALID, "options": {"rectify": {"every": 4, "seldom": 1}}}): ("rectify", "unknown key 'seldom'"),
}


def test_bad_json() -> None:
    assert lacking((line_of(saccade.Policy.from_json, text), words) for text, words in DOCUMENTS.items()) == []


@given(st.text(max_size=40))
@settings(max_examples=20)
def test_no_text_but_a_spec_gets_through(text: str) -> None:
    """Any text is a policy or a one-line `PolicyError`, as spec and as JSON."""
    assert "\n" not in refusal(text)
    line = line_of(saccade.Policy.from_json, text)  # the shortest that is valid has 41 characters
    assert line and lacking([(line, ())]) == []


ANY_VALUE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@given(
    st.sampled_from(sorted(OPTIONS)),
    st.dictionaries(
        st.sampled_from(sorted({option for options in OPTIONS.values() for option in options})),
        ANY_VALUE | st.lists(st.integers(-2, 9), max_size=2),
    ),
)
def test_no_value_but_a_valid_one_gets_through(name: str, options: dict[str, Any]) -> None:
    line = refusal(name, **options)
    assert "\n" not in line
    if not line:
        budget = saccade.policy(name, **options).budget
        assert budget is None or budget >= 1
