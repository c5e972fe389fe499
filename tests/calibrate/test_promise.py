"""The promise of `tune`: its two bounds against plain ones, what passes that should not, and what passes by luck."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from claims.promise.simulation import WAYS, Grid, World, errors
from saccade.calibrate.promise import (
    ALPHA,
    CORRELATION,
    MARGIN,
    best_shown,
    cheapest,
    judge,
    ratio_shown,
    texts_needed,
    walk,
)

Table = Any


def table(both: int, lost: int, gained: int, neither: int = 0) -> tuple[Table, Table]:
    """A candidate and dense attention, one question a text, from how many were right of which."""
    dense = [1] * (both + lost) + [0] * (gained + neither)
    candidate = [1] * both + [0] * lost + [1] * gained + [0] * neither
    return np.array(candidate, dtype=bool)[:, None], np.array(dense, dtype=bool)[:, None]


def tail(lost: int, count: int, probability: float) -> float:
    """P(at most `lost` of `count`), term by term."""
    return math.fsum(math.comb(count, k) * probability**k * (1 - probability) ** (count - k) for k in range(lost + 1))


def by_texts(candidate: Table, dense: Table, quality: float, alpha: float) -> bool:
    """Student's t test over texts of what the candidate has right beyond a share of dense attention's."""
    beyond = candidate.sum(1) - quality * dense.sum(1)
    if np.ptp(beyond) < 1e-12:
        return bool(beyond.mean() >= 0)
    return bool(stats.ttest_1samp(beyond, 0, alternative="greater").pvalue <= alpha)


@pytest.mark.parametrize("quality", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("alpha", [0.05, 0.005])
@pytest.mark.parametrize("count", [20, 150, 900])
def test_against_a_perfect_model_the_binomial_tail_and_t_decide(quality: float, alpha: float, count: int) -> None:
    """One question a text: it passes iff so few losses had at most 0.95 alpha at the ratio, and t says so too."""
    decided = set()
    middle, spread = count * (1 - quality), math.sqrt(count * quality * (1 - quality))
    for lost in range(max(int(middle - 5 * spread - 2), 0), int(middle) + 2):
        candidate, dense = table(count - lost, lost, 0)
        exact = tail(lost, count, 1 - quality) <= 0.95 * alpha
        passed = judge(candidate, dense, quality, alpha).passed
        assert passed == (exact and by_texts(candidate, dense, quality, alpha)), lost
        decided.add(passed)
    assert False in decided
    assert True in decided or quality**count > 0.95 * alpha


def test_questions_of_a_text_count_by_their_design_effect() -> None:
    """Nothing lost: as many single questions show as much as texts of twelve do, fractions and all."""
    texts = 46
    alone = texts * 12 / (1 + 11 * CORRELATION)
    dense = np.ones((texts, 12), dtype=bool)
    assert judge(dense, dense, 0.9, ALPHA).shown == pytest.approx((0.95 * ALPHA) ** (1 / alone), rel=1e-9)
    # Half of the texts right throughout, the others nowhere: 23 texts, not 46 half ones.
    half = dense & (np.arange(texts) % 2 == 0)[:, None]
    assert judge(half, half, 0.5, ALPHA).shown == pytest.approx((0.95 * ALPHA) ** (2 / alone), rel=1e-9)


def test_gains_are_the_odds_that_are_exactly_bounded() -> None:
    """4,000 single questions, 2,000 right: 40 lost and 200 gained; the tails of both bounds, found by bisection."""
    candidate, dense = table(1960, 40, 200, 1800)
    most = optimize.brentq(lambda p: tail(40, 2000, p) - 0.95 * ALPHA, 0.001, 0.5)
    least = optimize.brentq(lambda p: 1 - tail(199, 2200, p) - 0.05 * ALPHA, 0.001, 0.5)
    verdict = judge(candidate, dense, 0.9, ALPHA)
    counted = 1 - most + least / (1 - least)
    assert counted > 1.02 and verdict.shown == 1 and verdict.passed
    fewer = judge(*table(1960, 40, 30, 1970), 0.9, ALPHA)
    least = optimize.brentq(lambda p: 1 - tail(29, 2030, p) - 0.05 * ALPHA, 0.001, 0.5)
    assert fewer.shown == pytest.approx(1 - most + least / (1 - least), abs=1e-6)
    assert by_texts(*table(1960, 40, 30, 1970), fewer.shown, ALPHA)


def test_texts_that_are_lost_whole_are_bounded_by_t() -> None:
    """Beyond the correlation that counts take for granted: what is shown is where the t test over texts just passes."""
    dense = np.ones((400, 24), dtype=bool)
    candidate = dense & (np.arange(400) % 2 == 0)[:, None]
    shown = judge(candidate, dense, 0.3, ALPHA).shown
    assert by_texts(candidate, dense, shown - 1e-6, ALPHA)
    assert not by_texts(candidate, dense, shown + 1e-6, ALPHA)


counts = st.integers(0, 400)


@settings(max_examples=60)
@given(counts, counts, counts, counts, st.sampled_from([0.05, 0.01]))
def test_what_is_shown_moves_the_right_way(both: int, lost: int, gained: int, neither: int, alpha: float) -> None:
    if both + lost + gained + neither < 2 or not both + lost:
        return
    slack = 1e-9  # of a beta quantile found by iteration

    def shown(*outcome: int, alpha: float = alpha) -> float:
        return judge(*table(*outcome), 0.5, alpha).shown

    here = shown(both, lost, gained, neither)
    if both:
        assert shown(both - 1, lost + 1, gained, neither) <= here + slack
    if neither:
        assert shown(both, lost, gained + 1, neither - 1) >= here - slack
    assert shown(both, lost, gained, neither, alpha=alpha / 2) <= here + slack


@settings(max_examples=30)
@given(counts, st.integers(0, 40), st.integers(0, 40), counts, st.floats(0.05, 0.99))
def test_a_verdict_says_the_ratio_what_was_kept_and_what_is_shown(
    both: int, lost: int, gained: int, neither: int, quality: float
) -> None:
    candidate, dense = table(both + 2, lost, gained, neither)
    verdict = judge(candidate, dense, quality, ALPHA)
    assert verdict.ratio == (both + 2 + gained) / (both + 2 + lost)
    assert verdict.kept == (both + 2) / (both + 2 + lost)
    assert 0 <= verdict.shown <= min(verdict.ratio, 1)
    assert verdict.passed == (verdict.shown >= quality)


def test_one_text_shows_nothing() -> None:
    dense = np.ones((1, 500), dtype=bool)
    assert judge(dense, dense, 0.01, ALPHA).shown == 0


def test_who_was_asked_the_first_texts_only_does_not_pass() -> None:
    """However good it was: when to stop was decided by its answers."""
    dense = np.ones((200, 12), dtype=bool)
    dense[150:] = False
    assert judge(dense, dense, 0.9, ALPHA).passed
    early = judge(dense[:150], dense, 0.9, ALPHA)
    assert early.shown > 0.9 and early.ratio == 1 and not early.passed


def test_nothing_right_shows_nothing() -> None:
    verdict = judge(*table(0, 0, 0, 50), 0.5, ALPHA)
    assert not verdict.passed and verdict.shown == 0
    lost_all = judge(*table(0, 50, 0), 0.5, ALPHA)
    assert not lost_all.passed and lost_all.ratio == lost_all.shown == 0


@pytest.mark.parametrize(("quality", "families"), [(0.99, 1), (0.99, 9), (0.9, 4), (0.5, 1)])
@pytest.mark.parametrize("asked", [1, 12, 24])
def test_texts_needed_are_the_fewest_that_can_pass(quality: float, families: int, asked: int) -> None:
    needed = texts_needed(quality, asked, families)
    for texts in (needed, needed - 1):
        dense = np.ones((texts, asked), dtype=bool)
        if texts > 1:
            verdict = judge(dense, dense, quality, ALPHA / families)
            assert verdict.passed == (texts == needed)
            assert verdict.shown == pytest.approx(best_shown(texts, asked, families), rel=1e-12)
    assert texts_needed(1 - 1e-9, asked, families) > 10**9  # as a number, not as so many texts
    assert best_shown(1, asked, families) == 0  # one text shows nothing, however much it is asked
    # What is asked where nobody says how much lets a candidate lose a tenth of what it may.
    usual = texts_needed(quality, asked, families, margin=MARGIN)
    assert usual >= needed
    lost = np.full(usual, MARGIN * (1 - quality) * asked)
    assert ratio_shown(lost, np.zeros(usual), np.full(usual, asked), ALPHA / families) >= quality


# --- questions that fail together -------------------------------------------------------------------------------------


def test_what_breaks_the_promise_hardly_ever_passes() -> None:
    """A part of `python -m claims promise`: 60 texts of 12, with every correlation, cause and accuracy."""
    found = errors(Grid((8, 60), (12,), losses=(0.03, 0.05, 0.1)), runs=300, again=4000, seed=1)
    assert found["exceed"] == 0
    assert found["worlds"] > 100 and max(row["rate"] for row in found["rows"]) > 0.005  # it can be seen to fail
    refused = {(one["texts"], one["loss"]) for one in found["refused"]}
    assert refused == {(8, 0.03), (8, 0.05), (8, 0.1), (60, 0.03)}
    assert all(one["needed"] > one["texts"] for one in found["refused"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accuracy", [0.5, 0.75, 0.9, 1.0])
def test_what_answers_as_dense_attention_passes(way: str, accuracy: float) -> None:
    """100 texts of 12 questions at a correlation of 0.1: in at least 80% of runs at 0.97, with every accuracy."""
    world = World(100, 12, accuracy, 0.0, 0.1, way, 0.0)
    assert world.passing(0.97, 400, np.random.default_rng(3)) >= 0.8 * 400


@pytest.mark.parametrize("way", WAYS)
def test_simulated_answers_are_as_correlated_as_they_should_be(way: str) -> None:
    """Or the simulation would prove nothing: means, and how much more a text's count of losses spreads."""
    rng, texts, asked, correlation = np.random.default_rng(4), 200_000, 12, 0.3
    lost, gained, right = World(texts, asked, 0.9, 0.05, correlation, way, 0.5)._draw(1, rng)
    assert (right - lost + gained).sum() / right.sum() == pytest.approx(0.95, abs=0.005)
    assert lost.sum() / right.sum() == pytest.approx(0.1, abs=0.005)
    assert right.mean() / asked == pytest.approx(0.9, abs=0.005)
    effect = right.var() / (asked * 0.9 * 0.1)
    assert effect == pytest.approx(1 + (asked - 1) * correlation, rel=0.05)


# --- several candidates -------------------------------------------------------------------------------------------


def texts_of(share: float, texts: int, asked: int, rng: np.random.Generator) -> Table:
    return rng.random((texts, asked)) < share


def test_a_walk_ends_at_the_first_failure() -> None:
    dense = np.ones((100, 4), dtype=bool)
    good, bad = dense.copy(), dense.copy()
    bad[:, 0] = False
    families = {"one": ["a", "b", "c"], "other": ["d", "e"]}
    verdicts = walk(families, {"a": good, "b": bad, "c": good, "d": good, "e": good}, dense, 0.95)
    assert {spec: verdict.passed for spec, verdict in verdicts.items()} == {"a": 1, "b": 0, "d": 1, "e": 1}
    costs = {"a": 5.0, "b": 1.0, "c": 0.5, "d": 4.0, "e": 3.0}
    assert cheapest(verdicts, costs) == "e"  # neither what failed nor what nobody judged
    assert cheapest(walk({"one": ["b", "a"]}, {"a": good, "b": bad}, dense, 0.95), costs) is None


def test_families_share_alpha() -> None:
    """A candidate that just passes alone fails in company; a family's length costs nothing."""
    count = texts_needed(0.9, 1, 1)
    dense = np.ones((count, 1), dtype=bool)
    assert walk({"a": ["a"]}, {"a": dense}, dense, 0.9)["a"].passed
    many = {f"a{n}": dense for n in range(6)}
    assert walk({"a": list(many)}, many, dense, 0.9)["a5"].passed
    apart = walk({name: [name] for name in many}, many, dense, 0.9)
    assert not any(verdict.passed for verdict in apart.values())
    shown = [walk({f"a{n}": [f"a{n}"] for n in range(total)}, many, dense, 0.9)["a0"].shown for total in (1, 2, 4, 6)]
    assert shown == sorted(shown, reverse=True) and len(set(shown)) == 4
    more = texts_needed(0.9, 1, 6)
    assert more > count
    larger = {name: np.ones((more, 1), dtype=bool) for name in many}
    assert all(one.passed for one in walk({n: [n] for n in larger}, larger, larger["a0"], 0.9).values())


def fresh(rng: np.random.Generator, texts: int, asked: int) -> tuple[dict[str, Table], Table]:
    """Dense attention right at 0.9, and candidates that keep 0.95, just too little or 0.92 of that."""
    dense = texts_of(0.9, texts, asked, rng)
    tables = {}
    for name, share in SHARES.items():
        tables[name] = dense & (rng.random(dense.shape) < share)
    return tables, dense


QUALITY = 0.95
SHARES = {"a1": 0.999, "a2": 0.9499, "a3": 0.92, "b1": 0.9499, "b2": 0.9, "c1": 0.9499, "d1": 0.945, "d2": 0.9499}
FAMILIES = {"a": ["a1", "a2", "a3"], "b": ["b1", "b2"], "c": ["c1"], "d": ["d1", "d2"]}
COSTS = {name: float(len(SHARES) - place) for place, name in enumerate(SHARES)}


def test_what_is_chosen_on_new_data_breaks_the_promise_rarely() -> None:
    """Borderline candidates in four families, the cheaper the worse: 120 samples of 100 texts of 10 questions."""
    rng, trials = np.random.default_rng(4), 120
    chosen = [
        cheapest(walk(FAMILIES, tables, dense, QUALITY), COSTS)
        for tables, dense in (fresh(rng, 100, 10) for _ in range(trials))
    ]
    broken = sum(one is not None and SHARES[one] < QUALITY for one in chosen)
    assert broken <= stats.binom.isf(1e-4, trials, ALPHA)
    assert chosen.count("a1") > trials / 2  # it does choose, and what it chooses is right
