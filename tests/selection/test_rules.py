"""Rules and exact page scores against naive float64 loops; ties everywhere, rows shorter than their buffers."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import oracles
import saccade
from methods import oracles_composed as naive
from methods.drawing import NEEDED, SHAPE
from methods.layouts import Batch
from saccade.errors import PolicyError
from saccade.selection.rules import Framed, RankUnion, Ratio, Threshold, TopK, TopP
from saccade.selection.rules.framed import FrameableRule
from saccade.selection.scorers.exact import ExactScorer
from saccade.selection.selector import Rule, ScoredSelector, WindowSelector
from saccade.types import KVView, Rows, Selection

MASS_ERROR = 2 * (2 * 16 + 4) * 2.0**-24
"""Relative error of a probability, and of a sum of them: scores are exact, differ by at most 16 and are scaled by at
most 1, so that an exponent is off by two roundings of 16 and its exponential by 4 more, in the numerator and the
denominator; sums are in float64."""


def ranked(scores: Sequence[float], count: int) -> list[int]:
    """The first `count` units from the best down, ties to the lower position."""
    return oracles.topk(scores, count, count)


# --- running a rule -----------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn, longest: int = 60) -> tuple[list[list[list[float]]], int]:
    """Scores `[row][group][token]` on a grid of sixteenths from -8 to 8, mostly with ties, and a host bound."""
    lengths = draw(st.lists(st.sampled_from([1, 2, 3, 16, 17]) | st.integers(1, longest), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    groups, steps = draw(st.integers(1, 3)), draw(st.sampled_from([1, 16, 64, 128]))
    scores = [(rng.integers(-128 // steps, 128 // steps + 1, (groups, n)) * steps / 16).tolist() for n in lengths]
    return scores, max(lengths) + draw(st.sampled_from([0, 1, 7]))


def rows_of(lengths: list[int], max_len: int) -> Rows:
    table = torch.zeros((len(lengths), 1), dtype=torch.int32)
    return Rows.on_host(table, [0] * len(lengths), lengths, max_len=max_len)


def choose(rule: Rule, scores: list[list[list[float]]], max_len: int, unit: int = 1, scale: float = 1.0) -> Selection:
    """The rule's sets from unit scores; a row of n units is taken to end with its unit's last token."""
    padded = torch.full((len(scores), len(scores[0]), -(-max_len // unit)), -torch.inf)
    for row, groups in enumerate(scores):
        padded[row, :, : len(groups[0])] = torch.tensor(groups)
    return rule.choose(padded, rows_of([len(groups[0]) * unit for groups in scores], max_len), unit, scale)


def sets_of(selection: Selection) -> list[list[set[int]]]:
    """Sets `[row][group]`, after checking that the lists are what `Selection` promises."""
    assert selection.ids.dtype == selection.counts.dtype == torch.int32
    found = []
    for ids, counts in zip(selection.ids.tolist(), selection.counts.tolist(), strict=True):
        for chosen, count in zip(ids, counts, strict=True):
            assert chosen[:count] == sorted(set(chosen[:count])) and chosen[count:] == [-1] * (len(chosen) - count)
        found.append([set(chosen[:count]) for chosen, count in zip(ids, counts, strict=True)])
    return found


def check_between(selection: Selection, scores: list[list[list[float]]], small: naive.Rule, large: naive.Rule) -> None:
    """Sets lie between two oracles' and are always the current token and the best others."""
    assert selection.overflowed is not None and selection.overflowed.dtype == torch.bool
    for row, sets in enumerate(sets_of(selection)):
        for group, chosen in enumerate(sets):
            own = scores[row][group]
            least, most = (rule(own, len(own), 1) for rule in (small, large))
            assert {*least.units} <= chosen <= {*most.units}
            assert least.overflowed <= bool(selection.overflowed[row, group]) <= most.overflowed
            assert chosen == {len(own) - 1, *ranked(own, len(own) - 1)[: len(chosen) - 1]}


SCALES = st.sampled_from([1.0, 8**-0.5, 0.05])
BUFFERS = st.sampled_from([1, 2, 3, 100]) | st.integers(1, 64)


@given(batches(), st.sampled_from([1e-9, 0.5, 0.9, 0.99, 0.999999, 1.0]) | st.floats(0.01, 1), BUFFERS, SCALES)
def test_top_p(batch: tuple[list[list[list[float]]], int], p: float, buffer: int, scale: float) -> None:
    scores, max_len = batch
    selection = choose(TopP(p, buffer), scores, max_len, scale=scale)
    assert selection.ids.shape[-1] == min(buffer, max_len)
    check_between(
        selection,
        scores,
        naive.top_p(p if p == 1 else p - MASS_ERROR, buffer, scale),
        naive.top_p(min(1.0, p + MASS_ERROR), buffer, scale),
    )


@given(batches(), st.sampled_from([1e-6, 1e-4, 0.01, 0.02, 0.1, 0.5]) | st.floats(1e-7, 0.99), BUFFERS, SCALES)
def test_threshold(batch: tuple[list[list[list[float]]], int], tau: float, buffer: int, scale: float) -> None:
    scores, max_len = batch
    selection = choose(Threshold(tau, buffer), scores, max_len, scale=scale)
    assert selection.ids.shape[-1] == min(buffer, max_len)
    check_between(
        selection,
        scores,
        naive.threshold(tau * (1 + MASS_ERROR), buffer, scale),
        naive.threshold(tau * (1 - MASS_ERROR), buffer, scale),
    )


def test_mass_is_that_of_scaled_scores() -> None:
    """Three tokens of scaled scores ln 6, ln 3 and ln 1: masses 0.6, 0.3 and, the current one, 0.1."""
    scores = [[[2 * math.log(6), 2 * math.log(3), 0.0]]]
    for p, expected in ((0.05, {2}), (0.69, {0, 2}), (0.71, {0, 1, 2})):
        assert sets_of(choose(TopP(p, 8), scores, 3, scale=0.5)) == [[expected]]
    for tau, expected in ((0.61, {2}), (0.59, {0, 2}), (0.31, {0, 2}), (0.29, {0, 1, 2})):
        assert sets_of(choose(Threshold(tau, 8), scores, 3, scale=0.5)) == [[expected]]
    # Masses of four equal tokens are exact: two of them reach a half, and none exceeds a quarter.
    assert sets_of(choose(TopP(0.5, 8), [[[1.0] * 4]], 4)) == [[{0, 3}]]
    assert sets_of(choose(Threshold(0.25, 8), [[[1.0] * 4]], 4)) == [[{3}]]
    full = choose(TopP(0.95, 2), scores, 3, scale=0.5)
    assert sets_of(full) == [[{0, 2}]] and full.overflowed is not None and full.overflowed.tolist() == [[True]]


@given(
    batches(),
    st.sampled_from([0.1, 0.3, 0.07, 0.5, 1.0, 1e-05, 0.3333333333333333]),
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from([1, 4, 16]),
)
def test_ratio(batch: tuple[list[list[list[float]]], int], kept: float, minimum: int, local: int, unit: int) -> None:
    (scores, units), local = batch, min(local, minimum)
    rule, oracle = Ratio(kept, minimum, local), naive.ratio(kept, minimum, local)
    selection = choose(rule, scores, units * unit, unit)
    assert selection.unit == unit and selection.overflowed is None
    assert sets_of(selection) == [[{*oracle(row, len(row), unit).units} for row in groups] for groups in scores]
    for groups in scores:
        assert rule.covers(len(groups[0]) * unit, unit) == all(
            len(oracle(range(n), n, unit).units) == n for n in range(1, len(groups[0]) + 1)
        )


@given(
    st.floats(5e-324, 1) | st.integers(1, 10**6).map(lambda n: n / 10**6) | st.integers(1, 99).map(lambda n: n / 100),
    st.integers(1, 2**31 - 1) | st.integers(1, 10**4) | st.integers(1, 7).map(lambda e: 10**e),
)
@example(0.5000000000000001, 2)
@example(0.1000000000000001, 30)
@example(0.07, 100)
def test_share_of_any_row_is_exact(kept: float, units: int) -> None:
    """Up to as many units as an int32 counts, and in 64-bit products.

    0.07 * 100 is 7.000000000000001 in binary, and 7 to whoever writes it.
    """
    assert Ratio(kept).share.of(units) == min(units, math.ceil(units * Fraction(str(kept))))


def test_local_units_must_fit_the_smallest_set() -> None:
    for local in (0, 4):
        with pytest.raises(PolicyError, match=rf"local_pages={local} is not valid: .* which is 3"):
            Ratio(0.1, minimum=3, local=local)


@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_covered_rows_are_whole(length: int, page: int, data: st.DataObject) -> None:
    """`covers` promises the whole row, for every shorter one too, and promises it wherever scores cannot deny it."""
    budget = data.draw(st.integers(page, 40))
    units = -(-length // page)
    for rule, unit in (
        (TopK(budget), page),
        (Ratio(data.draw(st.sampled_from([0.1, 0.5, 0.95, 1.0])), data.draw(st.integers(1, 9))), page),
        (TopP(1.0, budget), 1),
        (TopP(0.999, budget), 1),
        (Threshold(1e-6, budget), 1),
        (RankUnion(budget + 5, 4, 0.25), 1),
    ):
        count = units if unit == page else length
        scores = [[torch.arange(count, 0, -1.0).tolist()]]
        rows = rows_of([length], length)
        whole = int(rule.choose(torch.tensor(scores), rows, unit, 40.0).counts) == count
        if rule.covers(length, unit):
            assert whole and all(rule.covers(shorter, unit) for shorter in range(1, length))
        elif not isinstance(rule, (TopP, Threshold)) and (unit == 1 or length % unit == 0):
            assert not whole


@pytest.mark.parametrize("rule", [TopP(0.9, 64), Threshold(0.01, 64)])
def test_pages_have_no_probability(rule: Rule) -> None:
    with pytest.raises(PolicyError, match="a page of 16 tokens has no probability"):
        choose(rule, [[[1.0, 2.0]]], 32, unit=16)


NO_WAIT = [TopK(8), Ratio(0.3, 4, 2), TopP(0.9, 8), TopP(1.0, 8), Threshold(0.01, 8), Framed(TopP(0.9, 8), 2, 3)]


@pytest.mark.parametrize("rule", [*NO_WAIT, Ratio(0.3, framed=True)])
def test_no_rule_synchronises_with_the_host(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.item()` and data-dependent shapes raise on a fake tensor; widths follow from the options and `max_len`."""
    monkeypatch.setattr("saccade.kernels.topk.api.choose", lambda *_, **__: "reference")  # others may look
    with FakeTensorMode():
        zeros = torch.zeros(2, dtype=torch.int32)
        rows = Rows(zeros[:, None], zeros, zeros + 1, 40)
        selection = rule.choose(torch.empty(2, 3, 40), rows, 1, 0.3)
    assert selection.ids.shape == (2, 3, 12 if isinstance(rule, Ratio) else 8)


# --- sinks and a window -------------------------------------------------------------------------------------------


@given(batches(), st.integers(0, 6), st.integers(0, 9), st.integers(0, 20), st.sampled_from([1, 4]), SCALES, st.data())
def test_a_frame_is_inside_every_set(
    batch: tuple[list[list[list[float]]], int],
    sinks: int,
    window: int,
    spare: int,
    unit: int,
    scale: float,
    data: st.DataObject,
) -> None:
    """The best others fill what sinks and window leave of the size; of pages as many count as hold so many tokens."""
    scores, units = batch
    held = -(-sinks // unit) + max(1, -(-window // unit))
    frame: dict[str, Any] = {"sinks": sinks, "window": window}
    kept = data.draw(st.sampled_from([0.1, 0.3, 1.0]))
    pairs: list[tuple[FrameableRule, naive.Rule]] = [
        (TopK((held + spare) * unit), naive.top_k((held + spare) * unit, **frame)),
        (Ratio(kept, minimum=held), naive.ratio(kept, held, **frame)),
    ]
    if unit == 1:
        pairs += [
            (TopP(1.0, held + spare), naive.top_p(1.0, held + spare, scale, **frame)),
            (TopP(0.83, held + spare), naive.top_p(0.83, held + spare, scale, **frame)),
            (Threshold(0.013, held + spare), naive.threshold(0.013, held + spare, scale, **frame)),
        ]
    for rule, oracle in pairs:
        found = choose(Framed(rule, sinks, window), scores, units * unit, unit, scale)
        for row, sets in enumerate(sets_of(found)):
            for group, chosen in enumerate(sets):
                wanted = oracle(scores[row][group], len(scores[row][group]) * unit, unit)
                if wanted.margin > 1:
                    assert chosen == {*wanted.units}
                    assert found.overflowed is None or bool(found.overflowed[row, group]) == wanted.overflowed


@pytest.mark.parametrize(("length", "unit"), [(1500, 1), (9000, 64), (7, 1)])
def test_a_share_of_the_row_keeps_lychee_decodes_frame(length: int, unit: int) -> None:
    """Of 1,024 tokens or more 128 sinks and 256 recent ones, as its code; of fewer an eighth and a quarter."""
    units = -(-length // unit)
    scores = torch.randn(1, 2, units, generator=torch.Generator().manual_seed(length))
    wanted = [{*naive.growing(0.3)(row.tolist(), length, unit).units} for row in scores[0]]
    assert sets_of(Ratio(0.3, framed=True).choose(scores, rows_of([length], length), unit, 1.0)) == [wanted]
    if length == 1500:
        assert {*range(56), *range(1500 - 112, 1500)} <= wanted[0] and len(wanted[0]) == 450


@pytest.mark.parametrize(
    ("options", "frame"),
    [
        ({"budget": 1024}, (128, 256)),
        ({"budget": 100}, (12, 25)),
        ({"budget": 2048, "page": 64}, (128, 256)),
        ({"budget": 384, "sinks": 128, "window": 256}, (128, 256)),
        ({"budget": 512, "window": 8}, (0, 8)),
    ],
)
def test_lychee_decodes_frame_is_that_of_its_code(options: dict[str, Any], frame: tuple[int, int]) -> None:
    selector = saccade.policy("lychee_decode", roles="every:4", **options).plan(SHAPE).selector
    assert isinstance(selector, ScoredSelector) and isinstance(selector.rule, Framed)
    assert (selector.rule.sinks, selector.rule.window) == frame


@pytest.mark.parametrize("name", ["tidal", "lychee_decode", "composed"])
def test_no_frame_is_the_plain_rule(name: str) -> None:
    needed = {**NEEDED.get(name, {}), "sinks": 0, "window": 0}
    selector = saccade.policy(name, budget=64, **needed).plan(SHAPE).selector
    assert isinstance(selector, ScoredSelector) and selector.rule == TopK(64)
    assert name == "lychee_decode" or saccade.policy(name, budget=64).plan(SHAPE).selector == selector


# --- rows of length 0, which pad a captured batch ------------------------------------------------------------------

WIDTH = 40
LENGTHS = [0, 17, 0, 40, 1]


def padded_rows(lengths: list[int]) -> Rows:
    zeros = torch.zeros(len(lengths), dtype=torch.int32)
    return Rows(zeros[:, None], zeros, torch.tensor(lengths, dtype=torch.int32), WIDTH)


@pytest.mark.parametrize(
    ("rule", "unit"),
    [
        (TopK(8), 1),
        (TopK(16), 4),
        (RankUnion(budget=12, sinks=2, recent=0.25), 1),
        (Ratio(0.25, minimum=3, local=2), 4),
        (Threshold(0.01, buffer=16), 1),
        (TopP(0.8, buffer=16), 1),
        (Framed(TopK(16), 2, 5), 4),
        (Framed(TopP(0.8, buffer=16), 2, 5), 1),
        (Ratio(0.9, framed=True), 4),
    ],
)
def test_an_empty_row_has_an_empty_set(rule: Rule, unit: int) -> None:
    """And the others what they get alone."""
    scores = torch.randn(len(LENGTHS), 4, WIDTH // unit, generator=torch.Generator().manual_seed(0))
    units = torch.tensor([-(-length // unit) for length in LENGTHS])
    # What follows a row is undefined.
    scores = scores.masked_fill(torch.arange(WIDTH // unit) >= units[:, None, None], torch.nan)
    selection = rule.choose(scores, padded_rows(LENGTHS), unit, 1.0)
    for row, length in enumerate(LENGTHS):
        if length == 0:
            assert not selection.counts[row].any() and bool((selection.ids[row] == -1).all())
        else:
            alone = rule.choose(scores[row : row + 1], padded_rows([length]), unit, 1.0)
            assert torch.equal(selection.counts[row], alone.counts[0]) and torch.equal(selection.ids[row], alone.ids[0])


def test_a_window_of_an_empty_row_is_empty() -> None:
    page = torch.zeros(1, WIDTH, 1, 16)
    kv = KVView(page, page, padded_rows(LENGTHS))
    selection = WindowSelector(budget=8, sinks=2).select(torch.zeros(len(LENGTHS), 1, 16), kv, None, None, 1.0)
    assert selection.counts[:, 0].tolist() == [0, 8, 0, 8, 1]
    assert bool((selection.ids[[0, 2]] == -1).all())


@pytest.mark.parametrize("page", [1, 16])
def test_stored_scores_are_looked_at_up_to_the_end_of_the_row(page: int) -> None:
    stored = torch.randn(len(LENGTHS), 2, WIDTH, generator=torch.Generator().manual_seed(0))
    behind = torch.arange(WIDTH) >= torch.tensor(LENGTHS)[:, None, None]
    kv = KVView(torch.zeros(1, WIDTH, 2, 16), torch.zeros(1, WIDTH, 2, 16), padded_rows(LENGTHS))
    scorer, rule, chosen = ExactScorer("max", page), TopK(2 * page), []
    for filling in (-torch.inf, torch.nan):
        scores = scorer.score(torch.zeros(len(LENGTHS), 2, 16), kv, None, stored.masked_fill(behind, filling))
        chosen.append(rule.choose(scores, kv.rows, page, 1.0))
    assert torch.equal(chosen[0].ids, chosen[1].ids) and torch.equal(chosen[0].counts, chosen[1].counts)


# --- exact page scores --------------------------------------------------------------------------------------------


@given(
    layout=st.sampled_from(["padded", "paged"]),
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    page=st.sampled_from([1, 2, 3, 16, 64]),
    pooling=st.sampled_from(["max", "mean", "each"]),
    group=st.sampled_from([1, 2, 4]),
)
def test_a_page_scores_as_its_best_token(
    layout: str, seed: int, lengths: list[int], page: int, pooling: str, group: int
) -> None:
    """From the cache and from stored token scores; beyond the row there is NaN in memory and -inf in the scores."""
    batch = Batch.random(np.random.default_rng(seed), lengths, layers=1, kv_heads=2, group=group)
    batch.step()
    view, q = batch.views(layout, torch.float32)[0], batch.queries(0, torch.float32)
    scorer = ExactScorer(pooling, page)  # type: ignore[arg-type]  # drawn as text
    scores = scorer.score(q, view, None)
    assert scores.shape[-1] == -(-view.rows.max_len // page) and scorer.unit == page and scorer.fused
    assert torch.equal(scorer.score(q, view, None, ExactScorer(pooling).score(q, view, None)), scores)  # type: ignore[arg-type]
    for row, length in enumerate(batch.lengths):
        queries, keys = batch.q[row][0], batch.k[row][0]
        for column in range(scores.shape[1]):
            head = column // group if pooling == "each" else column
            own = queries[head * group : (head + 1) * group]
            asked = {"max": own, "mean": [own.mean(axis=0)], "each": [queries[column]]}[pooling]
            expected = [
                max(float(query @ key) for query in asked for key in keys[head, start : start + page])
                for start in range(0, length, page)
            ]
            assert scores[row, column].tolist() == [*expected, *[-math.inf] * (scores.shape[-1] - len(expected))]


@pytest.mark.parametrize("agreeing", [0, 5, 9])
def test_a_union_of_heads_that_agree_is_as_full_as_of_others(agreeing: int) -> None:
    """More than their first ranks are looked at where these do not fill the set; a row that fits is whole."""
    rule, heads, lengths = RankUnion(40, 4, 0.25), 9, [130, 33, 130]
    rng = np.random.default_rng(agreeing)
    scores = torch.tensor(rng.permuted(np.tile(np.arange(130.0), (3, heads, 1)), axis=2), dtype=torch.float32)
    scores[:, :agreeing] = scores[:, :1]
    found = rule.choose(scores, rows_of(lengths, 130), 1, 1.0)
    for row, length in enumerate(lengths):
        wanted = set(range(length))
        if length > rule.budget:
            middle = range(rule.sinks, length - rule.window)
            best = [sorted(middle, key=lambda token, one=one: -one[token]) for one in scores[row].tolist()]
            wanted = {*range(rule.sinks), *range(length)[-rule.window :], *oracles.rank_union(best, rule.chosen)}
        assert found.counts[row].tolist() == [len(wanted)]
        assert set(found.ids[row, 0, : len(wanted)].tolist()) == wanted
