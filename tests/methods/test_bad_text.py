"""One clear line for specs and JSON that no policy writes, and for whatever else is given."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import saccade
from one_line import lacking

from .drawing import OPTIONS
from .refusing import check_line, line_of, refusal

SPECS: dict[str, tuple[str, ...]] = {
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
def test_no_text_but_a_spec_gets_through(text: str) -> None:
    """Any text is a policy or a one-line `PolicyError`, as spec and as JSON."""
    assert "\n" not in refusal(text)
    line = line_of(saccade.Policy.from_json, text)  # the shortest that is valid has 41 characters
    assert line and lacking([(line, ())]) == []


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@given(
    st.sampled_from(sorted(OPTIONS)),
    st.dictionaries(
        st.sampled_from(sorted({option for options in OPTIONS.values() for option in options})),
        VALUES | st.lists(st.integers(-2, 9), max_size=2),
    ),
)
def test_no_value_but_a_valid_one_gets_through(name: str, options: dict[str, Any]) -> None:
    line = refusal(name, **options)
    assert "\n" not in line
    if not line:
        budget = saccade.policy(name, **options).budget
        assert budget is None or budget >= 1
