"""The promise of `tune`: exact tails, the size of its test where a candidate just fails, and what passes by luck."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from saccade.calibrate.promise import ALPHA, cheapest, design_effect, judge, questions_needed, resampled, walk

Table = Any


def table(both: int, lost: int, gained: int, neither: int = 0) -> tuple[Table, Table]:
    """A candidate and dense attention, one question a text, from how many were right of which."""
    dense = [1] * (both + lost) + [0] * (gained + neither)
    candidate = [1] * both + [0] * lost + [1] * gained + [0] * neither
    return np.array(candidate, dtype=bool)[:, None], np.array(dense, dtype=bool)[:, None]


def tail(lost: int, count: int, probability: float) -> float:
    """P(at most `lost` of `count`), term by term."""
    return math.fsum(math.comb(count, k) * probability**k * (1 - probability) ** (count - k) for k in range(lost + 1))


@pytest.mark.parametrize("quality", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("alpha", [0.05, 0.005])
@pytest.mark.parametrize("count", [20, 150, 900])
def test_against_a_perfect_model_the_binomial_tail_decides(quality: float, alpha: float, count: int) -> None:
    """Dense attention always right: it passes iff so few losses had at most 0.8 alpha at the share that is promised.

    What is promised is (1 - quality) of dense attention's accuracy, of which `count` right ones of `count` show only
    (alpha / 10) ** (1 / count), the share at which that many had a probability of alpha / 10.
    """
    shown = (0.1 * alpha) ** (1 / count)
    decided = set()
    middle, spread = count * (1 - quality), math.sqrt(count * quality * (1 - quality))
    for lost in range(max(int(middle - 4 * spread - 2), 0), int(middle) + 2):
        candidate, dense = table(count - lost, lost, 0)
        wanted = tail(lost, count, (1 - quality) * shown) <= 0.8 * alpha
        assert judge(candidate, dense, quality, alpha).passed == wanted, lost
        assert not wanted or tail(lost, count, 1 - quality) <= 0.8 * alpha
        decided.add(wanted)
    assert False in decided
    assert True in decided or quality**count > 0.8 * alpha * 0.9


@cache
def size_at(count: int, quality: float, both: float, lost: float, gained: float, alpha: float) -> float:
    """Probability of passing, summed over every outcome of `count` independent questions."""
    total = 0.0
    rest = max(1 - both - lost - gained, 0.0)
    for b, l, g in itertools.product(range(count + 1), repeat=3):  # noqa: E741  # both, lost, gained
        n = count - b - l - g
        if n < 0 or (rest == 0 and n) or (gained == 0 and g):
            continue
        candidate, dense = table(b, l, g, n)
        if judge(candidate, dense, quality, alpha).passed:
            total += stats.multinomial.pmf([b, l, g, n], count, [both, lost, gained, rest])
    return total


@pytest.mark.parametrize(
    ("count", "quality", "both", "lost", "gained"),
    [
        (70, 0.9, 0.9, 0.1, 0.0),  # dense attention always right
        (22, 0.5, 0.45, 0.5, 0.025),
        (22, 0.5, 0.2, 0.4, 0.1),
        (22, 0.6, 0.6, 0.4, 0.0),
        (22, 0.3, 0.1, 0.5, 0.08),
    ],
)
def test_what_breaks_the_promise_hardly_ever_passes(
    count: int, quality: float, both: float, lost: float, gained: float
) -> None:
    """Exactly: at or below the boundary the probability of passing is at most alpha, and it is not always 0."""
    assert gained - lost + (1 - quality) * (both + lost) <= 1e-12  # at or beyond the boundary
    for alpha in (0.05, 0.2):
        assert size_at(count, quality, both, lost, gained, alpha) <= alpha
    assert size_at(count, quality, both, lost, gained, 0.2) > 0


def test_the_test_is_not_needlessly_strict() -> None:
    """Dense attention always right, at the boundary: 0.8 alpha but for what whole numbers leave, and r0 takes."""
    assert size_at(70, 0.9, 0.9, 0.1, 0.0, 0.05) > 0.005
    # Far better than promised, it passes nearly always.
    passed = [judge(*table(1200 - lost, lost, 0), 0.98, ALPHA).passed for lost in range(12)]
    assert all(passed)


def test_size_by_simulation() -> None:
    """Independent questions at exactly the boundary, with gains and a dense model that errs: 2000 trials."""
    rng, alpha, quality, count, trials = np.random.default_rng(0), 0.05, 0.95, 600, 2000
    both, lost, gained = 0.83, 0.054, 0.0098
    assert gained - lost + (1 - quality) * (both + lost) == pytest.approx(0, abs=1e-12)
    outcomes = rng.multinomial(count, [both, lost, gained, 1 - both - lost - gained], size=trials)
    seen: dict[tuple[int, ...], bool] = {}
    passed = 0
    for outcome in map(tuple, outcomes.tolist()):
        if outcome not in seen:
            seen[outcome] = judge(*table(*outcome), quality, alpha).passed
        passed += seen[outcome]
    # More than this many of 2000 happen once in a million times if the size is alpha.
    assert passed <= stats.binom.isf(1e-6, trials, alpha)


counts = st.integers(0, 400)


@settings(max_examples=60)
@given(counts, counts, counts, counts, st.sampled_from([0.05, 0.01]), st.floats(1, 12))
def test_what_is_shown_moves_the_right_way(
    both: int, lost: int, gained: int, neither: int, alpha: float, effect: float
) -> None:
    if (both + lost + gained + neither) / effect < 1 or not both + lost:
        return
    slack = 1e-9  # of a beta quantile found by iteration

    def shown(*outcome: int, alpha: float = alpha, effect: float = effect) -> float:
        return judge(*table(*outcome), 0.5, alpha, effect).shown

    here = shown(both, lost, gained, neither)
    if both:
        assert shown(both - 1, lost + 1, gained, neither) <= here + slack
    if neither:
        assert shown(both, lost, gained + 1, neither - 1) >= here - slack
    assert shown(both, lost, gained, neither, alpha=alpha / 2) <= here + slack
    assert shown(both, lost, gained, neither, effect=1.5 * effect) <= here + slack


@settings(max_examples=30)
@given(counts, st.integers(0, 40), st.integers(0, 40), counts, st.floats(0.05, 0.99))
def test_what_is_shown_is_where_it_would_just_pass(
    both: int, lost: int, gained: int, neither: int, quality: float
) -> None:
    candidate, dense = table(both + 1, lost, gained, neither)
    verdict = judge(candidate, dense, quality, ALPHA)
    assert verdict.share == (both + 1 + gained) / (both + 1 + lost)
    assert 0 <= verdict.shown <= min(verdict.share, 1)
    if 0 < verdict.shown < 1:
        assert judge(candidate, dense, verdict.shown - 1e-6, ALPHA).passed
        assert not judge(candidate, dense, verdict.shown + 1e-6, ALPHA).passed
    if abs(verdict.shown - quality) > 1e-6:
        assert verdict.passed == (verdict.shown > quality)


def test_nothing_right_shows_nothing() -> None:
    verdict = judge(*table(0, 0, 0, 50), 0.5, ALPHA)
    assert not verdict.passed and verdict.shown == 0
    lost_all = judge(*table(0, 50, 0), 0.5, ALPHA)
    assert not lost_all.passed and lost_all.share == lost_all.shown == 0


@pytest.mark.parametrize(("quality", "families"), [(0.99, 1), (0.99, 9), (0.9, 4), (0.5, 1)])
def test_questions_needed_is_the_fewest_that_can_pass(quality: float, families: int) -> None:
    alpha = ALPHA / families

    def can(count: int) -> bool:  # no loss: 1 - (0.8 alpha) ** (1 / n) is the most that may have been lost
        return 1 - (0.8 * alpha) ** (1 / count) <= (1 - quality) * (0.1 * alpha) ** (1 / count)

    assert questions_needed(quality, families) == next(count for count in itertools.count(1) if can(count))


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
    count = questions_needed(0.9, 1)
    dense = np.ones((count, 1), dtype=bool)
    assert walk({"a": ["a"]}, {"a": dense}, dense, 0.9)["a"].passed
    many = {f"a{n}": dense for n in range(6)}
    assert walk({"a": list(many)}, many, dense, 0.9)["a5"].passed
    apart = walk({name: [name] for name in many}, many, dense, 0.9)
    assert not any(verdict.passed for verdict in apart.values())
    shown = [walk({f"a{n}": [f"a{n}"] for n in range(total)}, many, dense, 0.9)["a0"].shown for total in (1, 2, 4, 6)]
    assert shown == sorted(shown, reverse=True) and len(set(shown)) == 4
    more = questions_needed(0.9, 6)
    assert more > count
    larger = {name: np.ones((more, 1), dtype=bool) for name in many}
    assert all(one.passed for one in walk({n: [n] for n in larger}, larger, larger["a0"], 0.9).values())


def test_design_effect() -> None:
    rng = np.random.default_rng(1)
    texts, asked = 300, 12
    dense = np.ones((texts, asked), dtype=bool)
    independent = [texts_of(share, texts, asked, rng) for share in (0.7, 0.9)]
    # The correlation's estimate deviates by sqrt(2 / (12 · 11 · 300)) = 0.007: 4 of them, eleven times.
    assert 1 <= design_effect(independent, dense, 0.9) < 1 + 11 * 0.03
    same = [np.repeat(texts_of(share, texts, 1, rng), asked, axis=1) for share in (0.7, 0.9)]
    assert design_effect(same, dense, 0.9) == pytest.approx(asked)
    # Half of the texts' questions are one: correlation 1/4 between two of a text that share by chance 1/2 each.
    mixed = np.where(rng.random((texts, asked)) < 0.5, same[0], independent[0])
    assert design_effect([mixed], dense, 0.9) == pytest.approx(1 + 11 / 4, rel=0.25)
    assert design_effect([], dense, 0.9) == 1
    assert design_effect([same[0][:, :1]], dense[:, :1], 0.9) == 1
    assert design_effect([same[0][:1]], dense[:1], 0.9) == 1


@pytest.mark.parametrize("quality", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("texts", [30, 100, 300])
def test_a_candidate_that_answers_as_dense_attention_has_no_design_effect(quality: float, texts: int) -> None:
    """Nothing varies between texts if all is right; what rounding leaves is no correlation."""
    dense = np.ones((texts, 12), dtype=bool)
    assert design_effect([dense], dense, quality) == 1


def test_a_candidate_that_loses_nothing_passes_as_soon_as_one_can() -> None:
    quality, texts = 0.9, -(-questions_needed(0.9, 1) // 12)
    dense = np.ones((texts, 12), dtype=bool)
    assert walk({"a": ["a"]}, {"a": dense}, dense, quality)["a"].passed


def clustered(share: float, correlation: float, texts: int, asked: int, rng: np.random.Generator) -> Table:
    """Beta-binomial: every text has a share of its own."""
    scale = (1 - correlation) / correlation
    return rng.random((texts, asked)) < rng.beta(share * scale, (1 - share) * scale, (texts, 1))


@pytest.mark.parametrize("correlation", [0.05, 0.4])
def test_size_where_the_questions_of_a_text_resemble_one_another(correlation: float) -> None:
    rng, trials, quality = np.random.default_rng(2), 300, 0.9
    dense = np.ones((60, 12), dtype=bool)
    passed = 0
    for _ in range(trials):
        tables = {"one": clustered(quality, correlation, 60, 12, rng)}
        passed += walk({"one": ["one"]}, tables, dense, quality)["one"].passed
    # The effect itself is estimated: half as much again as alpha is let pass. 300 trials: once in a thousand times.
    assert passed <= stats.binom.isf(1e-3, trials, 1.5 * ALPHA)


def test_size_of_a_clustered_candidate_among_independent_ones() -> None:
    """Others whose losses are spread evenly must not make a candidate's few losing texts count for more."""
    rng, trials, quality = np.random.default_rng(3), 150, 0.95
    dense = np.ones((100, 12), dtype=bool)
    passed = 0
    for _ in range(trials):
        tables = {f"other {n}": texts_of(0.8, 100, 12, rng) for n in range(4)}
        tables["candidate"] = clustered(quality, 0.8, 100, 12, rng)
        passed += walk({name: [name] for name in tables}, tables, dense, quality)["candidate"].passed
    # A fifth of alpha is its family's; half as much again is let pass, since effects are estimated. More than this in
    # 150 trials happens once in a thousand times.
    assert passed <= stats.binom.isf(1e-3, trials, 1.5 * ALPHA / 5)


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
    """Borderline candidates in four families, the cheaper the worse: 120 samples of 40 texts of 10 questions."""
    rng, trials = np.random.default_rng(4), 120
    chosen = [
        cheapest(walk(FAMILIES, tables, dense, QUALITY), COSTS)
        for tables, dense in (fresh(rng, 40, 10) for _ in range(trials))
    ]
    broken = sum(one is not None and SHARES[one] < QUALITY for one in chosen)
    assert broken <= stats.binom.isf(1e-4, trials, ALPHA)
    assert chosen.count("a1") > trials / 2  # it does choose, and what it chooses is right


def test_halves_of_a_table_say_the_same() -> None:
    """`resampled` on one table whose candidates are all but one just too bad by that very table."""
    rng = np.random.default_rng(5)
    tables, dense = fresh(rng, 80, 10)
    for name, one in tables.items():
        if SHARES[name] < QUALITY:  # move it to just below the boundary, at random places
            wanted = math.ceil(QUALITY * dense.sum()) - 1
            places = rng.permutation(np.argwhere(dense if one.sum() < wanted else one))
            for text, question in places:
                if one.sum() == wanted:
                    break
                one[text, question] = one.sum() < wanted
            assert one.sum() == wanted
    kept = resampled(FAMILIES, tables, dense, COSTS, QUALITY, splits=80, seed=1)
    assert kept.splits == 80 == sum(kept.chosen.values())
    assert kept.below == sum(count for name, count in kept.chosen.items() if name not in (None, "a1"))
    # A half of a table deviates from it less than from the world, so that alpha is more than enough.
    assert kept.below <= ALPHA * 80
    assert kept.broken <= ALPHA * 80
    assert kept.chosen["a1"] > 40
    few = [resampled(FAMILIES, tables, dense, COSTS, QUALITY, splits=5, seed=seed) for seed in (1, 1)]
    assert few[0] == few[1]


def test_broken_counts_the_other_half() -> None:
    """A candidate right on whole texts only: chosen where its good texts fall together, and then the others show it."""
    dense = np.ones((40, 60), dtype=bool)
    bad = dense.copy()
    bad[:3] = False
    # Half of 40 texts holds none of 3 bad ones with probability 20·19·18 / (40·39·38) = 0.1154.
    kept = resampled({"a": ["bad"]}, {"bad": bad}, dense, {"bad": 1.0}, 0.9, splits=200, seed=2)
    assert kept.chosen.get("bad", 0) == pytest.approx(0.1154 * 200, abs=4 * (200 * 0.1154 * 0.8846) ** 0.5)
    assert kept.broken == kept.chosen["bad"]  # 3 of 20 texts are lost on the other half
    assert kept.below == 0  # 37 of 40 is above 0.9
