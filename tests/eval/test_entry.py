"""Policies at budgets: which rows a comparison has."""

from __future__ import annotations

import pytest

from saccade.errors import PolicyError
from saccade.eval.entry import default_specs, make_entries, parse_budgets
from saccade.registry import policies


def specs(*given: str, budgets: tuple[int, ...] = (64, 256)) -> list[str]:
    return [entry.spec for entry in make_entries(given, budgets)[0]]


def test_budgets_fill_in_what_was_not_given() -> None:
    assert specs("tidal", "quest:budget=32") == ["dense", "tidal:budget=64", "tidal:budget=256", "quest:budget=32"]


def test_dense_is_there_once_and_first() -> None:
    assert specs("tidal:budget=8", "dense", "dense") == ["dense", "tidal:budget=8"]


def test_the_same_policy_twice_is_one_row() -> None:
    assert specs("tidal", "tidal:budget=64", "tidal") == ["dense", "tidal:budget=64", "tidal:budget=256"]


def test_what_a_budget_does_not_reach_is_said_once() -> None:
    _, notes = make_entries(["dense", "dense", "tidal:budget=9", "quest"], (64,))
    assert notes == (
        "dense: --budget is ignored, this policy has none",
        "tidal:budget=9: --budget is ignored, this policy has its own",
    )


def test_a_budget_that_is_too_small_leaves_its_entry_out() -> None:
    entries, notes = make_entries(["quest", "tidal"], (8, 64))
    assert [entry.spec for entry in entries] == ["dense", "quest:budget=64", "tidal:budget=8", "tidal:budget=64"]
    (note,) = notes
    assert note.startswith("left out: policy quest: budget=8 ")
    assert note.endswith("the smallest is 16")


def test_an_explicit_budget_that_is_too_small_is_an_error() -> None:
    with pytest.raises(PolicyError, match="the smallest is 16"):
        make_entries(["quest:budget=8", "tidal"], (64,))


def test_budgets_that_leave_nothing_to_compare_are_an_error() -> None:
    with pytest.raises(PolicyError, match=r"budget=2 .* the smallest is 5"):
        make_entries(["streaming", "quest"], (2, 3))


@pytest.mark.parametrize("bundled", [True, False])
def test_the_default_is_every_method(bundled: bool) -> None:
    entries, notes = make_entries(default_specs(bundled), (16, 256))
    assert {entry.policy.name for entry in entries} == set(policies()) - {"composed"}
    assert [entry.policy.name for entry in entries if entry.policy.budget is None] == ["dense", "resa"]
    assert [note.partition(":")[0] for note in notes] == ["dense", "left out", "resa"]
    assert "lychee_cluster" in notes[1]
    assert "the smallest is 33" in notes[1]


def test_labels_leave_the_budget_out() -> None:
    entries, _ = make_entries(["tidal:heads=query,reselect=3+4", "tidal"], (64,))
    assert [entry.label for entry in entries] == ["dense", "tidal reselect=3+4 heads=query", "tidal"]


def test_budgets_are_read_once_each() -> None:
    assert parse_budgets(" 64,256 ,64") == (64, 256)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "nan", "inf", "64,,256", "64 256", "²", "1e3"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(PolicyError, match="whole numbers"):
        parse_budgets(text)
