"""Effects and verdicts from samples that are known: each of the four verdicts, and what would tell."""

from dataclasses import replace
from typing import Any, Literal

import numpy
import pytest
from synthetic import LESS, Timed, claim, samples

from claims.judging.claim import HOLDS, MIXED, REFUTED, UNTOLD, Group, Sample, Test
from claims.judging.effects import FEWEST, QUARTILES, TEXTS, effect_of, unseen_share
from claims.judging.verdicts import judge, together
from saccade.errors import SaccadeError

HIGH = (0.9, 0.8, 0.9, 1.0, 0.8, 0.9, 0.9, 1.0)
LOW = (0.3, 0.4, 0.3, 0.5, 0.2, 0.3, 0.4, 0.4)
WILD = (0.0, 1.0, 0.1, 0.9, 0.0, 1.0, 0.2, 0.8)
SAMPLES = [*samples("a", *HIGH), *samples("b", *LOW), *samples("c", *HIGH), *samples("d", *WILD)]
MORE = replace(LESS, of=Group("b"), against=Group("a"))
UNCLEAR = replace(LESS, of=Group("d"), against=Group("d2"))
NOISE = [*SAMPLES, *samples("d2", *reversed(WILD))]


def test_the_interval_and_the_bound_decide() -> None:
    cases: list[tuple[str, tuple[Test, ...]]] = [
        (HOLDS, (LESS,)),
        (REFUTED, (MORE,)),
        (MIXED, (LESS, MORE)),
        (UNTOLD, (UNCLEAR,)),
        (UNTOLD, (LESS, UNCLEAR)),
        (REFUTED, (MORE, UNCLEAR)),
        (HOLDS, (LESS, replace(MORE, decides=False))),
        (REFUTED, (replace(LESS, bound=0.7),)),
        (REFUTED, (replace(LESS, direction="below"),)),
        (HOLDS, (replace(MORE, direction="below", bound=-0.3),)),
    ]
    judged = [judge(claim(*tests), NOISE) for _, tests in cases]
    assert [one.verdict for one in judged] == [verdict for verdict, _ in cases]
    assert all(one.n == len(HIGH) and bool(one.power) == (one.verdict == UNTOLD) for one in judged)
    assert [together(ones) for ones in ([HOLDS, HOLDS], [HOLDS, MIXED])] == [HOLDS, MIXED]
    assert together([UNTOLD, HOLDS, REFUTED]) == MIXED


def test_a_broken_premise_tells_nothing() -> None:
    premise = replace(LESS, effect="right of a alone", against=None, bound=0.95)
    judgement = judge(claim(LESS, premises=[premise]), SAMPLES)
    assert judgement.outcomes[0].verdict == HOLDS and judgement.verdict == UNTOLD
    assert judgement.power.startswith("right of a alone is not above 0.95 (0.8")
    assert judgement.power.endswith("Could tell: a larger model")
    assert judge(claim(LESS, premises=[replace(premise, bound=0.5)]), SAMPLES).verdict == HOLDS


def test_the_interval_is_that_of_texts() -> None:
    effect = effect_of(LESS, SAMPLES, TEXTS)
    differences = numpy.subtract(HIGH, LOW)
    assert effect.value == pytest.approx(differences.mean()) and effect.interval is not None
    # The normal interval of eight pairs; a bootstrap of as few is somewhat narrower, and never by half.
    half = 1.96 * differences.std(ddof=1) / len(differences) ** 0.5
    assert 0.7 * half < (effect.interval[1] - effect.interval[0]) / 2 < 1.1 * half
    assert effect_of(LESS, SAMPLES, TEXTS) == effect


def test_a_few_texts_decide_nothing() -> None:
    few = [sample for sample in SAMPLES if int(sample.text) < FEWEST - 1]
    assert effect_of(LESS, few, TEXTS).interval is None
    judgement = judge(claim(LESS), few)
    assert judgement.verdict == UNTOLD and "no interval from 5 texts" in judgement.power


def test_power_says_how_many_texts_would_tell() -> None:
    # Half a width of 0.5 shrinks to 0.05 with a hundred times as many.
    test = replace(UNCLEAR, reported=0.05)
    effect = effect_of(test, NOISE, TEXTS)
    assert effect.interval is not None
    half = (effect.interval[1] - effect.interval[0]) / 2
    needed = int(numpy.ceil(8 * (half / 0.05) ** 2))
    assert f"the paper's 0.05 would take about {needed:,}" in judge(claim(test), NOISE).power
    test = replace(LESS, bound=-0.05)
    told = judge(claim(test), alike({"a": 0.5, "b": 0.5}, 16))
    assert told.verdict == UNTOLD and "all 16 texts say the same, and about 59 of them would tell" in told.power
    assert judge(claim(test), alike({"a": 0.5, "b": 0.5}, 58)).verdict == UNTOLD
    assert judge(claim(test), alike({"a": 0.5, "b": 0.5}, 59)).verdict == HOLDS
    never = judge(claim(replace(LESS, against=Group("c"))), SAMPLES)
    assert never.verdict == UNTOLD and "all 8 texts say the same, and more of them would" in never.power


SEEN = 0.05**0.1
"""Of all texts, what ten that say the same leave seen."""


def alike(values: dict[str, float], n: int, measure: str = "right") -> list[Sample]:
    return [sample for arm, value in values.items() for sample in samples(arm, *[value] * n, measure=measure)]


@pytest.mark.parametrize(
    ("of", "against", "kind", "low", "high"),
    [
        # Of a share that is 0 or 1 on all texts: the exact interval, all of whose error is on one side.
        ("all", None, "difference", SEEN, 1.0),
        ("none", None, "difference", 0.0, 1 - SEEN),
        ("all", "none", "difference", 2 * SEEN - 1, 1.0),
        # Unseen texts where the other arm is right alone, or right nowhere.
        ("all", "half", "ratio", SEEN / (0.5 * SEEN + 1 - SEEN), 1 / (0.5 * SEEN)),
    ],
)
def test_texts_that_say_the_same_leave_others_unseen(
    of: str, against: str | None, kind: Literal["difference", "ratio"], low: float, high: float
) -> None:
    test = replace(LESS, of=Group(of), against=None if against is None else Group(against), kind=kind)
    effect = effect_of(test, alike({"all": 1.0, "none": 0.0, "half": 0.5}, 10), TEXTS)
    assert effect.alike and effect.interval is not None
    assert effect.interval == pytest.approx((low, high))


@pytest.mark.parametrize(("n", "differing"), [(16, 0), (16, 2), (7, 2), (16, 3)])
def test_a_few_texts_that_differ_do_not_narrow_the_interval(n: int, differing: int) -> None:
    """Where hardly any says anything else, what lies unseen is as much as if none did.

    A resample of sixteen has none of three in 4% of cases, none of two in 12%: of three the bootstrap knows.
    """
    held = [*samples("a", *[0.5] * n), *samples("b", *[0.5] * (n - differing), *[0.4] * differing)]
    effect = effect_of(LESS, held, TEXTS)
    assert effect.interval is not None and effect.value == pytest.approx(0.1 * differing / n)
    low, high = effect.interval
    share, seen = unseen_share(n), 0.5 - 0.1 * differing / n
    assert effect.alike == (differing == 0)
    if differing == 3:
        assert low >= 0 and high <= 0.1
    else:
        assert low == pytest.approx((1 - share) * 0.5 - (1 - share) * seen - share)
        assert high == pytest.approx((1 - share) * 0.5 + share - (1 - share) * seen)


def test_measures_without_limits_have_no_interval_where_texts_say_the_same() -> None:
    same = [*alike({"a": 2.5, "b": 2.5}, 8, measure="loss@4"), *alike({"a": 0.1, "b": 0.4}, 8, measure="gap@2")]
    effect = effect_of(replace(LESS, measure="loss@4"), same, TEXTS)
    assert (effect.value, effect.interval, effect.alike) == (0, None, True)
    assert "no interval from 8 texts that say the same" in judge(claim(replace(LESS, measure="loss@4")), same).power
    # The gap is a difference of shares: another text's could be 2 less.
    gap = effect_of(replace(LESS, measure="gap@2"), same, TEXTS)
    assert gap.interval == pytest.approx((-0.3 - 1.7 * unseen_share(8), -0.3 + 2.3 * unseen_share(8)))


def test_a_ratio_is_one_of_means() -> None:
    test = replace(LESS, kind="ratio", bound=2.0)
    effect = effect_of(test, SAMPLES, TEXTS)
    assert effect.value == pytest.approx(sum(HIGH) / sum(LOW))
    assert judge(claim(test), SAMPLES).verdict == HOLDS
    nothing = [*SAMPLES, *samples("none", *[0.0] * 8)]
    assert effect_of(replace(test, against=Group("none")), nothing, TEXTS).value is None


def test_the_best_arm_is_chosen_by_the_other_texts_or_by_other_arms() -> None:
    # Pure luck: every arm is right on its own text alone. Whoever chose with that text would find 1.
    lucky = [sample for arm in range(8) for sample in samples(f"x={arm}", *numpy.eye(8)[arm].tolist())]
    assert effect_of(Test("best", "right", Group("x=*", "best")), lucky, TEXTS).value == 0
    better = [*lucky, *samples("x=9", *[0.5] * 8)]
    assert effect_of(Test("best", "right", Group("x=*", "best")), better, TEXTS).value == 0.5
    assert effect_of(Test("worst", "right", Group("x=*", "worst")), lucky, TEXTS).value == 1
    assert effect_of(Test("median", "right", Group("x=*", "median")), better, TEXTS).value == 0
    both = [*samples("p=1", *HIGH), *samples("p=2", *LOW), *samples("q=1", *LOW), *samples("q=2", *HIGH)]
    own, by = Group("q=*", "best"), Group("q=*", "best", by="p=*")
    assert effect_of(Test("own", "right", own), both, TEXTS).value == pytest.approx(numpy.mean(HIGH))
    assert effect_of(Test("others'", "right", by), both, TEXTS).value == pytest.approx(numpy.mean(LOW))


def timing(point: str, arm: str, ms: float, ends: tuple[float, float]) -> Sample:
    return Sample(point, arm, {"ms": ms}, {"ms": ends})


FASTER = Test("time of a over b", "ms", Group("a"), Group("b"), kind="ratio", direction="below", bound=1.0)


def test_timings_decide_at_every_point() -> None:
    long = [timing("long", "a", 1, (0.9, 1.1)), timing("long", "b", 2, (1.8, 2.2))]
    short = [timing("short", "a", 2, (1.9, 2.1)), timing("short", "b", 1, (0.9, 1.1))]
    near = [timing("near", "a", 1, (0.9, 1.2)), timing("near", "b", 1.1, (1.0, 1.2))]
    timed = replace(claim(FASTER), settings=Timed())
    assert judge(timed, long).verdict == HOLDS and judge(timed, short).verdict == REFUTED
    assert judge(timed, [*long, *short]).verdict == MIXED
    assert judge(timed, [*long, *near]).verdict == UNTOLD
    effect = effect_of(FASTER, long, QUARTILES)
    assert effect.interval == (0.9 / 2.2, 1.1 / 1.8) and effect.value == 0.5
    assert judge(replace(timed, tests=(replace(FASTER, at="lon*"),)), [*long, *short]).verdict == HOLDS


def test_a_pattern_without_samples_is_an_error() -> None:
    given: tuple[tuple[dict[str, Any], str], ...] = (
        ({"of": Group("e*")}, r"no arm 'e\*'"),
        ({"measure": "wrong"}, "no arm 'a'"),
        ({"at": "none"}, "nothing was measured at 'none'"),
    )
    for changes, says in given:
        with pytest.raises(SaccadeError, match=says):
            effect_of(replace(LESS, **changes), SAMPLES, TEXTS)
