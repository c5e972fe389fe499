"""From effects to a verdict, and what it would take where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, log, log1p
from typing import Any

from .claim import HOLDS, MIXED, REFUTED, UNTOLD, Claim, Sample, Test
from .effects import LUCK, Effect, effect_of, unseen_share


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test.

    Attributes:
        power: what would tell; "" where it is told.
    """

    test: Test
    effect: Effect
    verdict: str
    power: str

    def to_dict(self) -> dict[str, Any]:
        """As results hold it."""
        return {**asdict(self.test), **asdict(self.effect), "verdict": self.verdict, "power": self.power}


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and what it rests on.

    Attributes:
        power: what n or what model could tell; "" unless the verdict is that it cannot be told.
    """

    verdict: str
    outcomes: tuple[Outcome, ...]
    premises: tuple[Outcome, ...]
    power: str

    @property
    def n(self) -> int:
        """Texts or points of the tests that decide, the fewest."""
        return min(outcome.effect.n for outcome in self.outcomes if outcome.test.decides)


def judge(claim: Claim, samples: Sequence[Sample]) -> Judgement:
    """What samples say of a claim."""
    rule = claim.settings.interval
    outcomes, premises = (
        tuple(_outcome(test, effect_of(test, samples, rule)) for test in tests)
        for tests in (claim.tests, claim.premises)
    )
    broken = [premise for premise in premises if premise.verdict != HOLDS]
    verdict = UNTOLD if broken else together([one.verdict for one in outcomes if one.test.decides])
    if verdict != UNTOLD:
        return Judgement(verdict, outcomes, premises, "")
    reasons = [f"{one.test.effect} is not {_wanted(one.test)} ({_told(one.effect)})" for one in broken]
    reasons += [f"{one.test.effect}: {one.power}" for one in outcomes if one.test.decides and one.power and not broken]
    return Judgement(UNTOLD, outcomes, premises, f"{'; '.join(reasons)}. Could tell: {claim.instrument}")


def together(verdicts: Sequence[str]) -> str:
    """All hold: it holds. Some hold and some are refuted: mixed. Refuted, and none holds: refuted. Else untold."""
    kinds = set(verdicts)
    if MIXED in kinds or {HOLDS, REFUTED} <= kinds:
        return MIXED
    if REFUTED in kinds:
        return REFUTED
    return HOLDS if kinds == {HOLDS} else UNTOLD


def _outcome(test: Test, effect: Effect) -> Outcome:
    verdict = (
        together([_side(test, ends) for _, _, ends in effect.points]) if effect.points else _side(test, effect.interval)
    )
    return Outcome(test, effect, verdict, _power(test, effect) if verdict == UNTOLD else "")


def _side(test: Test, interval: tuple[float, float] | None) -> str:
    """On which side of the bound an interval lies."""
    if interval is None or interval[0] <= test.bound <= interval[1]:
        return UNTOLD
    return HOLDS if (interval[0] > test.bound) == (test.direction == "above") else REFUTED


def _power(test: Test, effect: Effect) -> str:
    """What n would tell, by the width of the interval, which shrinks with its root."""
    if effect.value is None or effect.interval is None:
        alike = " that say the same" if effect.alike else ""
        return f"no interval from {effect.n} texts{alike}"
    if effect.points:
        return "quartiles of the timings reach over the bound"
    if effect.alike:
        return f"all {effect.n} texts say the same, and {_more_alike(test, effect.value, effect.interval, effect.n)}"
    half = (effect.interval[1] - effect.interval[0]) / 2
    told = [f"{effect.n} texts tell what lies {half:.2g} beyond {test.bound:g}"]
    for whose, value in (("the paper's", test.reported), ("what was seen,", effect.value)):
        if value is not None and value != test.bound:
            needed = ceil(effect.n * (half / (value - test.bound)) ** 2)
            told.append(f"{whose} {value:.2g} would take about {needed:,}")
    return ", ".join(told)


def _more_alike(test: Test, value: float, interval: tuple[float, float], n: int) -> str:
    """How many texts that say the same would tell: their bound shrinks with their number, not with its root."""
    end = interval[0] if value > test.bound else interval[1]
    if value in (test.bound, end):
        return "more of them would"
    share = unseen_share(n) * (test.bound - value) / (end - value)
    return f"about {ceil(log(LUCK) / log1p(-share)):,} of them would tell"


def _wanted(test: Test) -> str:
    return f"{test.direction} {test.bound:g}"


def _told(effect: Effect) -> str:
    return "no interval" if effect.interval is None else "{:.2g} to {:.2g}".format(*effect.interval)
