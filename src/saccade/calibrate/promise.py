"""The promise of `saccade tune`: what is chosen keeps a share of dense attention's right answers, with 95% confidence.

A candidate c keeps share q of dense attention d iff
P(c right, d wrong) - P(d right, c wrong) + (1 - q) P(d right) >= 0. Each of the three probabilities gets an exact
one-sided bound (Clopper and Pearson), and their errors add up to alpha. Questions about one text resemble one another,
so counts are divided by their design effect (after Korn and Graubard, 1998). That is estimated, so the whole is exact
for independent questions and approximate otherwise; the larger of the families' and the candidate's own effect counts.

Many candidates are tried, and the cheapest that passes is taken: without a correction some would pass by luck.
Candidates come in families, each walked from its most expensive one down to the first that fails, so that a family
spends its alpha once (fixed-sequence testing); families share alpha evenly (Bonferroni). So with probability 1 - alpha
nothing passes that does not keep the promise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from scipy.stats import beta

ALPHA = 0.05
_SPLIT = (0.8, 0.1, 0.1)
"""Shares of alpha: losses against dense attention decide, gains and dense attention's own accuracy hardly matter."""

Marks = numpy.ndarray[Any, numpy.dtype[numpy.bool_]]
"""Right or not, `[texts, questions]`."""
Tables = Mapping[str, Marks]
"""By spec."""
Families = Mapping[str, Sequence[str]]
"""Specs by family, most expensive first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Share of dense attention's right answers that a candidate gave, what is shown of it, and whether that will do."""

    share: float
    shown: float
    passed: bool


def judge(candidate: Marks, dense: Marks, quality: float, alpha: float, effect: float = 1.0) -> Verdict:
    """Whether a candidate keeps the promise, and what it is shown to keep.

    Args:
        candidate, dense: right or not, of the same shape.
        quality: wanted share of dense attention's accuracy.
        alpha: probability with which any of the three bounds may be wrong, above 0 and below 1.
        effect: design effect, at least 1.
    """
    count = dense.size / effect
    lost, gained, right = (mask.sum() / effect for mask in (dense & ~candidate, candidate & ~dense, dense))
    most_lost = float(beta.ppf(1 - _SPLIT[0] * alpha, lost + 1, count - lost)) if lost < count else 1.0
    least_gained = float(beta.ppf(_SPLIT[1] * alpha, gained, count - gained + 1)) if gained > 0 else 0.0
    least_right = float(beta.ppf(_SPLIT[2] * alpha, right, count - right + 1)) if right > 0 else 0.0
    # The largest share at which the sum of the module's head is not negative.
    shown = min(max(1 - (most_lost - least_gained) / least_right, 0.0), 1.0) if least_right else 0.0
    passed = least_gained - most_lost + (1 - quality) * least_right >= 0
    return Verdict(float(candidate.sum() / max(dense.sum(), 1)), shown, passed)


def design_effect(tables: Sequence[Marks], dense: Marks, quality: float) -> float:
    """How much less the questions of one text say than as many of different texts, mean over candidates; at least 1."""
    texts, asked = dense.shape
    if asked == 1 or texts < 2:
        return 1.0
    correlations = []
    for table in tables:
        values = table.astype(float) - quality * dense
        means = values.mean(1, keepdims=True)
        between = asked * ((means - values.mean()) ** 2).sum() / (texts - 1)
        within = ((values - means) ** 2).sum() / (texts * (asked - 1))
        if numpy.ptp(values) > 0:
            correlations.append((between - within) / (between + (asked - 1) * within))
    correlation = sum(correlations) / max(len(correlations), 1)
    return float(1 + (asked - 1) * max(correlation, 0.0))


@dataclass(frozen=True, slots=True)
class Standard:
    """What all candidates of some families are held to.

    `alpha` is one family's; `effect` the design effect by each family's first candidate, which is always asked.
    """

    dense: Marks
    quality: float
    alpha: float
    effect: float

    @classmethod
    def of(cls, families: Families, tables: Tables, dense: Marks, quality: float, alpha: float = ALPHA) -> Standard:
        """The standard of families that share alpha, by all answers."""
        effect = design_effect([tables[members[0]] for members in families.values()], dense, quality)
        return cls(dense, quality, alpha / len(families), effect)

    def verdict(self, table: Marks) -> Verdict:
        """Of a candidate's answers, by its own design effect if that is larger than the families'."""
        effect = max(self.effect, design_effect([table], self.dense, self.quality))
        return judge(table, self.dense, self.quality, self.alpha, effect)


def walk(families: Families, tables: Tables, dense: Marks, quality: float, alpha: float = ALPHA) -> dict[str, Verdict]:
    """Verdicts by spec, every family from its most expensive candidate down to the first that fails; behind it none."""
    standard = Standard.of(families, tables, dense, quality, alpha)
    verdicts: dict[str, Verdict] = {}
    for members in families.values():
        for spec in members:
            verdicts[spec] = standard.verdict(tables[spec])
            if not verdicts[spec].passed:
                break
    return verdicts


def cheapest(verdicts: Mapping[str, Verdict], costs: Mapping[str, float]) -> str | None:
    """The cheapest candidate that passed; None if none did."""
    passed = [spec for spec, verdict in verdicts.items() if verdict.passed]
    return min(passed, key=lambda spec: costs[spec]) if passed else None


def questions_needed(quality: float, families: int, alpha: float = ALPHA) -> int:
    """The fewest questions with which a candidate that loses none could pass, if dense attention is always right."""

    def could_pass(count: int) -> bool:
        right = numpy.ones((count, 1), dtype=bool)
        return judge(right, right, quality, alpha / families).passed

    high = 2
    while not could_pass(high):
        high *= 2
    return bisect_left(range(high), True, lo=high // 2 + 1, key=could_pass)


@dataclass(frozen=True, slots=True)
class Kept:
    """How often the promise held when one half of the texts chose and the other half scored.

    Attributes:
        chosen: how often each candidate was chosen; None: nothing passed, dense attention stays.
        broken: splits in which the chosen one missed the wanted share on the half that did not choose it.
        below: splits in which it misses that share on the whole table.
    """

    splits: int
    chosen: Mapping[str | None, int]
    broken: int
    below: int


def resampled(
    families: Families, tables: Tables, dense: Marks, costs: Mapping[str, float], quality: float, *,
    splits: int = 1000, seed: int = 0, alpha: float = ALPHA
) -> Kept:  # fmt: skip
    """Choose on one half of the texts and score on the other, again and again."""
    rng, chosen, broken, below = numpy.random.default_rng(seed), Counter[str | None](), 0, 0
    for _ in range(splits):
        order = rng.permutation(dense.shape[0])
        one, other = numpy.split(order, [len(order) // 2])
        verdicts = walk(families, {spec: table[one] for spec, table in tables.items()}, dense[one], quality, alpha)
        best = cheapest(verdicts, costs)
        chosen[best] += 1
        if best is not None:
            broken += bool(tables[best][other].sum() < quality * dense[other].sum())
            below += bool(tables[best].sum() < quality * dense.sum())
    return Kept(splits, chosen, broken, below)
