"""A screen: whom it lets through and who goes on, that others judge them, and what whole runs with it choose."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from searching import make_task, tune_settings

from claims.promise.stages import FAMILIES, Contest
from saccade.calibrate import tune as tune_module
from saccade.calibrate.promise import (
    ALPHA,
    FEWEST,
    FINALISTS,
    MARGIN,
    SCREENED,
    best_shown,
    cheapest,
    finalists,
    ratio_to_screen,
    screen,
    texts_needed,
    texts_to_screen,
    walk,
)
from saccade.calibrate.tune import Tuning
from saccade.errors import SaccadeError
from saccade.recipes.recipe import Recipe
from walking import among, crossed


def nothing(_: str) -> None:
    pass


# --- whom it lets through -----------------------------------------------------------------------------------------


def test_a_family_is_let_through_down_to_its_first_candidate_that_loses_too_much() -> None:
    dense = np.ones((10, 10), dtype=bool)

    def losing(count: int) -> Any:
        return np.arange(100).reshape(10, 10) >= count

    losses = {"a0": 0, "a1": 2, "a2": 3, "a3": 0, "b0": 3, "b1": 0, "c0": 1, "d0": 0, "d1": 0, "d2": 0}
    families = {name: [spec for spec in losses if spec.startswith(name)] for name in "abcd"}
    tables = {spec: losing(count) for spec, count in losses.items()}
    through = screen(families, tables, dense, 0.98)
    assert through == {"a": ["a0", "a1"], "b": [], "c": ["c0"], "d": ["d0", "d1", "d2"]}
    # Half of the dense answers: a candidate is measured by those, whatever else it has right.
    half = dense & (np.arange(10) < 5)
    assert screen({"a": ["a1"]}, tables, half, 1.0) == {"a": ["a1"]}

    costs = dict.fromkeys(losses, 9.0)
    assert finalists(through, costs | {"a1": 1.0, "c0": 3.0, "d2": 2.0}) == {"a": ["a0", "a1"], "d": ["d1", "d2"]}
    # What is cheap behind a failed one, or dear above the candidate, counts for nothing.
    assert finalists(through, costs | {"a3": 1.0, "b1": 1.0, "c0": 3.0, "d0": 1.0, "d2": 2.0, "a1": 4.0}) == {
        "d": ["d1", "d2"],
        "c": ["c0"],
    }
    assert finalists({"b": []}, costs) == {} and FINALISTS == 2


@pytest.mark.parametrize(("quality", "texts"), [(0.99, 32), (0.98, 17), (0.95, 8), (0.5, 8), (0.999, 32)])
def test_as_many_texts_screen_as_fit_the_ones_that_judge(quality: float, texts: int) -> None:
    assert texts_to_screen(quality, 12) == texts
    assert FEWEST <= texts <= SCREENED


@pytest.mark.parametrize("quality", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("asked", [1, 12])
def test_a_screen_wants_the_least_that_passes(quality: float, asked: int) -> None:
    fewest, usual = (texts_needed(quality, asked, FINALISTS, margin=margin) for margin in (0, MARGIN))
    wanted = {texts: ratio_to_screen(quality, texts, asked) for texts in (fewest, usual, 4 * usual, 10**7)}
    assert [*wanted.values()] == sorted(wanted.values(), reverse=True) and wanted[fewest] <= 1
    for texts, ratio in wanted.items():
        for hundredths, passes in ((0, True), (1, False)):
            losing = 1 - ratio + hundredths / 100 * (1 - quality)
            assert (best_shown(texts, asked, FINALISTS, losing=losing) >= quality) == passes
    assert wanted[usual] <= 1 - MARGIN * (1 - quality)
    assert wanted[10**7] == pytest.approx(quality, abs=0.02 * (1 - quality))


# --- simulated ----------------------------------------------------------------------------------------------------

WAYS = ("even", "rare", "whole", "joint")
JUST = ((1.0,),) * FAMILIES


def failing(chosen: Any) -> int:
    return sum(times for loss, times in chosen.items() if loss >= 1)


@pytest.mark.parametrize(
    ("way", "dense"), crossed(WAYS, ((1.0, 0.0), (0.9, 0.5)), lambda way, dense: dense[0] == 1 or way == "joint")
)
def test_what_fails_is_hardly_ever_chosen_behind_a_screen(way: str, dense: tuple[float, float]) -> None:
    """Eight families just below what is wanted, alone or with five rungs; correlations of 0.3 and 0.6."""
    rng, runs = np.random.default_rng(5), 120
    for correlation in (0.3, 0.6):
        for rungs in (1, 5):
            losses = ((1.0,) * rungs,) * FAMILIES
            found = Contest("", losses, 0.9, correlation, way, *dense).chosen(runs, rng)
            assert failing(found["screened"]) <= stats.binom.isf(1e-4, runs, ALPHA)


@pytest.mark.walk
def test_whom_a_screen_chose_its_own_texts_must_not_judge() -> None:
    """Single questions, eight families just below: on other texts they hardly pass, on the same ones too often."""
    contest, runs = Contest("", JUST, 0.9, 0.0, "even", asked=1), 1500
    found = contest.chosen(runs, np.random.default_rng(6))["screened"]
    assert 0 < failing(found) <= ALPHA * runs
    same, texts = 0, texts_needed(0.9, 1, FINALISTS)
    families, costs = {f"{n}": [f"{n}.0"] for n in range(FAMILIES)}, {f"{n}.0": float(n) for n in range(FAMILIES)}
    for tables, dense in contest._drawn(dict.fromkeys(costs, 1.0), texts, runs, np.random.default_rng(7)):
        going = finalists(screen(families, tables, dense, 1.0), costs)
        same += cheapest(walk(going, tables, dense, 0.9), costs) is not None
    assert same > ALPHA * runs


@pytest.mark.parametrize("correlation", [0.1, 0.6])
def test_what_answers_as_dense_attention_is_found_behind_a_screen(correlation: float) -> None:
    """All of them: always. One behind seven cheaper ones that lose five times what they may: nearly always."""
    rng, runs = np.random.default_rng(8), 60
    all_alike = Contest("", ((0.0,),) * FAMILIES, 0.95, correlation, "even", 0.9).chosen(runs, rng)
    assert all_alike == {"all judged": {0.0: runs}, "screened": {0.0: runs}}
    one = Contest("", (*((5.0,),) * 7, (0.0,)), 0.95, correlation, "even").chosen(runs, rng)["screened"]
    assert one[0.0] >= 0.9 * runs


# --- whole runs ---------------------------------------------------------------------------------------------------

POLICIES = ("streaming", "quest:page=4", "exact_topk:dense_layers=1", "less_is_more:reselect=3,rectify=4")
TEXTS = 24


@pytest.fixture(scope="module")
def task(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(folder, tmp_path_factory.mktemp("task") / "mine.jsonl", texts=TEXTS, asked=1)


def settings(folder: Path, task: Path, output: Path, **changes: Any) -> Any:
    given = {"quality": 0.5, "policies": POLICIES, "budgets": "16,48,64,96", **changes}
    return tune_settings(folder, output, task=str(task), **given)


def asked_of(output: Path) -> dict[str, set[int]]:
    """Numbers of the texts that each candidate was asked about."""
    found = defaultdict(set)
    for line in (output / "answers.jsonl").read_text().splitlines()[1:]:
        record = json.loads(line)
        found[record["spec"]].add(record["problem"])
    return found


@pytest.fixture(scope="module")
def screened(folder: Path, task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tuning, dict[str, Any]]:
    """A whole run, in which the choice falls before any text that judges is asked."""
    tuning = Tuning.check(settings(folder, task, output := tmp_path_factory.mktemp("out")))
    units, seen = list[str](), list[set[int]]()

    def spied(*given: Any) -> dict[str, list[str]]:
        seen.append(set.union(*asked_of(output).values()))
        return finalists(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_module, "finalists", spied)
        results = tuning.run(units.append)
    assert seen == [set(tuning.screening)]
    assert len(units) <= tuning.units < TEXTS * (1 + 16)
    return tuning, results


@pytest.mark.walk
def test_other_texts_judge_than_those_that_screen(screened: tuple[Tuning, dict[str, Any]]) -> None:
    tuning, results = screened
    first, texts = set(tuning.screening), asked_of(tuning.target.settings.output_dir)
    assert len(first) == FEWEST and first | set(tuning.judging) == set(range(TEXTS))
    assert results["screened"]["texts"] == sorted(first) != list(range(FEWEST))
    assert (results["texts"], results["n"], results["families"]) == (TEXTS - FEWEST, TEXTS - FEWEST, FINALISTS)
    assert results["screened"]["families"] == len(POLICIES)
    judged = {row["spec"] for row in results["rows"] if row["shown"] is not None}
    assert texts["dense"] == set(range(TEXTS))
    for row in results["rows"]:
        assert first <= texts[row["spec"]], "a candidate that the screen did not ask"
        assert (texts[row["spec"]] > first) == (row["spec"] in judged)
        assert row["n"] == len(texts[row["spec"]] - (first if row["spec"] in judged else set()))
    assert 2 <= len(judged) <= 4 and len({row["family"] for row in results["rows"] if row["spec"] in judged}) == 2


def test_results_say_who_was_screened_out_and_who_was_judged(screened: tuple[Tuning, dict[str, Any]]) -> None:
    tuning, results = screened
    wanted = results["screened"]["wanted"]
    assert wanted == ratio_to_screen(0.5, TEXTS - FEWEST, 1) > 0.5
    assert {"kept", "screened out", "not judged"} <= {row["status"] for row in results["rows"]}
    for family in {row["family"] for row in results["rows"]}:
        ladder = [row for row in results["rows"] if row["family"] == family]
        good = [row["screened"] >= wanted for row in ladder]
        through = good.index(False) if False in good else len(good)
        assert {row["status"] == "screened out" for row in ladder[:through]} <= {False}
        assert {row["status"] for row in ladder[through:]} <= {"screened out"}
        statuses = [row["status"] for row in ladder[:through]]
        judged = [place for place, status in enumerate(statuses) if status != "not judged"]
        assert judged in ([], [*range(through)][-2:])
    for row in results["rows"]:
        assert row["passed"] <= (row["shown"] is not None and row["shown"] >= 0.5)
    recipe = Recipe.read(tuning.target.recipe_path)
    assert recipe.found["tune"]["families"] == FINALISTS and str(recipe.policy) == results["chosen"]
    assert recipe.found["tune"]["screened"] == results["screened"]
    assert f"screening on {FEWEST} texts, judging on {TEXTS - FEWEST} others, 1 questions each" in tuning.design
    assert f"{best_shown(TEXTS - FEWEST, 1, FINALISTS):.4f} at best" in tuning.design
    assert "(families: 4, of which at most 2 are judged)" in tuning.design


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("stage", among(["screen", "border", "judging"], ["border"]))
def test_a_run_that_is_taken_up_makes_the_same_choice(
    folder: Path, task: Path, tmp_path: Path, screened: tuple[Tuning, dict[str, Any]], stage: str
) -> None:
    whole, results = screened
    of_screen = FEWEST * (1 + len(results["rows"]))
    after = {"screen": 21, "border": of_screen, "judging": of_screen + 7}[stage]
    steps: list[str] = []

    def stop(step: str) -> None:
        steps.append(step)
        if len(steps) == after:
            raise StoppedError

    with pytest.raises(StoppedError):
        Tuning.check(settings(folder, task, tmp_path)).run(stop)
    rest: list[str] = []
    again = Tuning.check(settings(folder, task, tmp_path)).run(rest.append)
    assert again == results | {"environment": again["environment"]}
    ledgers = [(place / "answers.jsonl").read_bytes() for place in (tmp_path, whole.target.settings.output_dir)]
    assert ledgers[0] == ledgers[1] and after + len(rest) == ledgers[0].count(b"\n") - 1


def test_where_the_screen_lets_nobody_through_no_other_text_is_asked(folder: Path, task: Path, tmp_path: Path) -> None:
    few = ("streaming", "quest:page=4", "exact_topk:dense_layers=1")
    tuning = Tuning.check(settings(folder, task, tmp_path, policies=few, budgets="8", quality=0.7))
    results = tuning.run(nothing)
    assert set.union(*asked_of(tmp_path).values()) == set(tuning.screening)
    assert {row["status"] for row in results["rows"]} == {"screened out"} and results["chosen"] is None
    assert (results["families"], results["best_shown"], results["texts"]) == (0, None, FEWEST)
    recipe = Recipe.read(tuning.target.recipe_path)
    assert str(recipe.policy) == "dense" and recipe.tuned
    assert recipe.found["tune"]["screened"]["families"] == 3


@pytest.mark.walk
def test_a_full_run_is_not_screened(folder: Path, task: Path, tmp_path: Path) -> None:
    """Everyone is asked everything, all families share alpha, as ever."""
    tuning = Tuning.check(settings(folder, task, tmp_path, full=True))
    results = tuning.run(nothing)
    assert tuning.screening == () and "screen" not in tuning.design and "(families: 4)" in tuning.design
    assert set(map(frozenset, asked_of(tmp_path).values())) == {frozenset(range(TEXTS))}
    assert (results["families"], results["texts"], results["screened"]) == (len(POLICIES), TEXTS, None)
    tables: dict[str, Any] = defaultdict(dict)
    for line in (tmp_path / "answers.jsonl").read_text().splitlines()[1:]:
        record = json.loads(line)
        tables[record["spec"]][record["problem"]] = record["right"]
    marks = {spec: np.array([table[n] for n in range(TEXTS)], dtype=bool) for spec, table in tables.items()}
    ladders: dict[str, list[str]] = defaultdict(list)
    for row in results["rows"]:
        ladders[row["family"]].append(row["spec"])
        assert row["correct"] == marks[row["spec"]].sum() and row["screened"] is None
    walked = walk(ladders, marks, marks["dense"], 0.5)
    assert {spec for spec, one in walked.items() if one.passed} == {
        row["spec"] for row in results["rows"] if row["status"] == "kept"
    }
    assert results["chosen"] == cheapest(walked, {row["spec"]: row["bytes"] for row in results["rows"]})


@pytest.mark.walk
def test_a_default_run_is_screened_and_a_full_one_asks_for_all(folder: Path, tmp_path: Path) -> None:
    """Of the built-in texts: how many, where nobody says it."""
    few, more = POLICIES[:2], POLICIES
    for full, policies, screening, judged in (
        (False, more, FEWEST, FINALISTS),
        (True, more, 0, 4),
        (False, few, 0, 2),
        (True, few, 0, 2),
    ):
        tuning = Tuning.check(tune_settings(folder, tmp_path, quality=0.9, questions=0, policies=policies, full=full))
        assert len(tuning.screening) == screening
        assert len(tuning.judging) == texts_needed(0.9, 5, judged, margin=MARGIN)
        assert tuning.target.settings.questions == 5 * len(tuning.problems)
    other = Tuning.check(tune_settings(folder, tmp_path, quality=0.9, questions=0, policies=more, seed=1))
    first = Tuning.check(tune_settings(folder, tmp_path, quality=0.9, questions=0, policies=more))
    assert other.screening != first.screening


def test_too_few_texts_for_both_are_not_screened(folder: Path, tmp_path: Path) -> None:
    """Judged all at once if that will do, and the line before the run says so; else the smaller number is named."""
    needed, behind = texts_needed(0.9, 5, 3), texts_needed(0.9, 5, FINALISTS)
    assert behind < needed < FEWEST + behind
    three = POLICIES[:3]

    def check(texts: int) -> Tuning:
        return Tuning.check(tune_settings(folder, tmp_path, quality=0.9, questions=5 * texts, policies=three))

    assert len(check(FEWEST + behind).screening) == FEWEST
    tuning = check(FEWEST + behind - 1)
    assert tuning.screening == () and "(families: 3, too few texts to screen them first)" in tuning.design
    assert f"{best_shown(FEWEST + behind - 1, 5, 3):.4f} at best" in tuning.design
    assert len(check(needed).problems) == needed
    with pytest.raises(SaccadeError, match=f"at least {needed} texts"):
        check(needed - 1)
