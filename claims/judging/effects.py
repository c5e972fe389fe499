"""From samples to an effect with its interval: texts are resampled whole, repeated timings speak by their quartiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite
from statistics import median
from typing import Any

import numpy
from numpy.typing import NDArray
from scipy.stats import bootstrap

from saccade.errors import SaccadeError

from .claim import Group, Sample, Test

TEXTS, QUARTILES = "texts", "quartiles"
RULES = {
    TEXTS: "95% bootstrap by text; where nearly all texts say the same, also what 5% of such luck would leave unseen",
    QUARTILES: "quartiles of repeated timings, at every point",
}
FEWEST = 6
"""Texts of which an interval is given: were all differences of fewer of one sign, chance would do that too."""

SHARES = frozenset("right ended attention token share hit jaccard build update grey open".split())
"""Measures between 0 and 1."""

DIFFERENCES = frozenset({"gap", "range"})
"""Measures that are the difference of two such."""

LUCK = 0.05
"""The chance that an interval does not hold what it should."""

_RESAMPLES = 9_999
_ROUNDING = 1e-9
Numbers = NDArray[numpy.float64]


@dataclass(frozen=True, slots=True)
class Effect:
    """What a test looks at.

    Attributes:
        value: over all texts; None where it is no number, as a ratio to nothing.
        interval: 95%; None of too few texts.
        n: texts, or points.
        alike: whether all texts say the same.
        points: name, value and interval of every point of a benchmark; none of texts.
    """

    value: float | None
    interval: tuple[float, float] | None
    n: int
    alike: bool = False
    points: tuple[tuple[str, float, tuple[float, float]], ...] = ()


def effect_of(test: Test, samples: Sequence[Sample], rule: str) -> Effect:
    """The effect of a test.

    Raises:
        SaccadeError: a pattern that no arm answers to.
    """
    here = [sample for sample in samples if fnmatchcase(sample.text, test.at)]
    if not here:
        raise SaccadeError(f"{test.effect}: nothing was measured at {test.at!r}")
    return _by_point(test, here) if rule == QUARTILES else _by_text(test, here)


def _by_text(test: Test, samples: Sequence[Sample]) -> Effect:
    table = _table(test, samples)
    of = _grouped(test.of, *table)
    against = numpy.zeros_like(of) if test.against is None else _grouped(test.against, *table)
    ratio = test.kind == "ratio"

    def statistic(first: Any, second: Any, axis: int = -1) -> Any:
        first, second = numpy.mean(first, axis=axis), numpy.mean(second, axis=axis)
        with numpy.errstate(divide="ignore", invalid="ignore"):
            return first / second if ratio else first - second

    value = float(statistic(of, against))
    if not isfinite(value):
        return Effect(None, None, len(of))
    if len(of) < FEWEST:
        return Effect(value, None, len(of))
    drawn = bootstrap(
        (of, against), statistic, paired=True, vectorized=True, n_resamples=_RESAMPLES, method="percentile", rng=0
    )
    low, high = map(float, drawn.confidence_interval)
    interval = (low, high) if isfinite(low) and isfinite(high) else None
    differing = 0 if high - low < _ROUNDING else _differing(of, against, ratio)
    # Else a resample has none of the texts that differ more often than an interval may be wrong.
    if (1 - differing / len(of)) ** len(of) <= LUCK:
        return Effect(value, interval, len(of))
    unseen = _unseen(test, statistic, float(of.mean()), float(against.mean()), len(of))
    if differing == 0:
        return Effect(value, unseen, len(of), True)
    if unseen is not None and interval is not None:
        interval = (min(low, unseen[0]), max(high, unseen[1]))
    return Effect(value, interval, len(of))


def _differing(of: Numbers, against: Numbers, ratio: bool) -> int:
    """How many texts do not say what most of them do."""
    said = numpy.stack([of, against], 1) if ratio else (of - against)[:, None]
    _, counts = numpy.unique(numpy.round(said / _ROUNDING), axis=0, return_counts=True)
    return len(of) - int(counts.max())


def unseen_share(n: int) -> float:
    """The largest share of texts that `n` texts miss with a chance of 5%: about 3/n, the rule of three."""
    return 1 - float(LUCK ** (1 / n))


def _unseen(test: Test, statistic: Callable[..., Any], of: float, against: float, n: int) -> tuple[float, float] | None:
    """Where the effect can lie if nearly all of `n` texts say the same, of whose means a bootstrap makes no interval.

    Other texts may say anything that the measure can; they are `unseen_share` of all, or chance would have shown one.
    None of measures without limits.
    """
    within = limits(test.measure)
    if within is None:
        return None
    none, (least, most) = (0.0, 0.0), within
    low_against, high_against = none if test.against is None else (least, most)
    share = unseen_share(n)

    def mixed(seen: float, unseen: float) -> list[float]:
        return [(1 - share) * seen + share * unseen]

    low = float(statistic(mixed(of, least), mixed(against, high_against)))
    high = float(statistic(mixed(of, most), mixed(against, low_against)))
    return (low, high) if isfinite(low) and isfinite(high) else None


def limits(measure: str) -> tuple[float, float] | None:
    """Between which values a measure lies; None if it has no limits."""
    name = measure.partition("@")[0].partition("~")[0]
    return (0.0, 1.0) if name in SHARES else (-1.0, 1.0) if name in DIFFERENCES else None


def _table(test: Test, samples: Sequence[Sample]) -> tuple[list[str], Numbers]:
    """Arms, and their values `[arms, texts]` of the texts that all of them have."""
    wanted = [group.arms for group in (test.of, test.against) if group is not None]
    wanted += [group.by for group in (test.of, test.against) if group is not None and group.by is not None]
    held: dict[str, dict[str, float]] = {}
    for sample in samples:
        if test.measure in sample.values and any(fnmatchcase(sample.arm, pattern) for pattern in wanted):
            held.setdefault(sample.arm, {})[sample.text] = sample.values[test.measure]
    for pattern in wanted:
        if not any(fnmatchcase(arm, pattern) for arm in held):
            raise SaccadeError(f"{test.effect}: no arm {pattern!r} has measured {test.measure!r}")
    shared = set.intersection(*(set(values) for values in held.values()))
    texts = [text for text in dict.fromkeys(sample.text for sample in samples) if text in shared]
    return [*held], numpy.array([[values[text] for text in texts] for values in held.values()], dtype=numpy.float64)


def _grouped(group: Group, arms: Sequence[str], values: Numbers) -> Numbers:
    """One number a text."""
    own = values[[fnmatchcase(arm, group.arms) for arm in arms]]
    if group.how == "mean":
        return numpy.asarray(own.mean(axis=0))
    if group.how == "median":
        return numpy.asarray(numpy.median(own, axis=0))
    judge = own if group.by is None else values[[fnmatchcase(arm, group.by) for arm in arms]]
    others = judge.sum(axis=1, keepdims=True) - judge
    texts = numpy.arange(own.shape[1])
    chosen = others.argmax(axis=0) if group.how == "best" else others.argmin(axis=0)
    return numpy.asarray(own[chosen, texts])


def _by_point(test: Test, samples: Sequence[Sample]) -> Effect:
    """At every point: its value, and an interval from the quartiles least in favour of either side."""
    points = []
    for point in dict.fromkeys(sample.text for sample in samples):
        here = [sample for sample in samples if sample.text == point]
        of = _timed(test, test.of, here)
        if test.against is None:
            value, low, high = of
        else:
            against = _timed(test, test.against, here)
            if test.kind == "ratio":
                value, low, high = of[0] / against[0], of[1] / against[2], of[2] / against[1]
            else:
                value, low, high = of[0] - against[0], of[1] - against[2], of[2] - against[1]
        points.append((point, value, (low, high)))
    lows, highs = ([ends[side] for _, _, ends in points] for side in (0, 1))
    return Effect(median(value for _, value, _ in points), (min(lows), max(highs)), len(points), points=tuple(points))


def _timed(test: Test, group: Group, samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Value and quartiles of the group's one arm."""
    own = [sample for sample in samples if fnmatchcase(sample.arm, group.arms) and test.measure in sample.values]
    if len(own) != 1:
        raise SaccadeError(f"{test.effect}: {len(own)} arms {group.arms!r} have measured {test.measure!r}, not one")
    value = own[0].values[test.measure]
    return (value, *(own[0].ends or {}).get(test.measure, (value, value)))
