"""The promise of `saccade tune`: the accuracy of what is chosen is at least a share of dense attention's, with 95%
confidence, over texts like those asked.

What is promised is the *ratio of accuracies*, right answers of the candidate per right answer of dense attention. What
it *kept*, the share of dense attention's right answers that it gave too, is reported beside it; gains are not in it.

The questions of one text fail together, so texts are the units, and the ratio is shown only as far as two bounds allow:

- *By counts*: ratio = 1 - lost / right + gained / right, each by an exact binomial bound (Clopper and Pearson) that
  counts questions by their design effect (Kish; Korn and Graubard, 1998). The correlation in it is not estimated: a
  sample without a loss tells nothing of how losses cluster. It is taken to be `CORRELATION`. That is above the 0.6
  for which it is tested, because dense attention's right answers can cluster more than all answers do.
- *By texts*: Student's t over the texts' right answers, as Fieller's (1954) bound of a ratio. It holds whatever the
  correlation, but not where losses are rare and heavy: without any it would show everything. There counts decide.

With T texts of m questions and no loss, counts say as much as T m / (1 + (m - 1) CORRELATION) single questions, at
most T / CORRELATION; that is why fewer texts than `texts_needed` are refused. `python -m claims promise` simulates how
often a candidate passes that fails.

Many candidates are tried, and the cheapest that passes is taken: without a correction some would pass by luck.
Candidates come in families, each walked from its most expensive one down to the first that fails, so that a family
spends its alpha once (fixed-sequence testing); families share alpha evenly (Bonferroni). So with probability 1 - alpha
nothing passes that does not keep the promise. Where some texts screen all families, only `finalists` are judged, on
other texts: whom the screen chose tells nothing of those, so that alpha is shared by the finalists alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy
from scipy.stats import beta
from scipy.stats import t as student

ALPHA, CORRELATION = 0.05, 0.75
_SPLIT = (0.95, 0.05)
"""Shares of alpha: losses against dense attention decide, gains hardly matter."""
MARGIN = 0.1
"""Where the user names no number of questions, a candidate passes that loses this share of what it may lose."""
FEWEST, SCREENED = 8, 32
"""Texts of which anything is concluded before all are asked, at least; and that screen families, at most."""
FINALISTS, RUNGS = 2, 2
"""Families that are judged behind a screen, and candidates of each."""

Marks = numpy.ndarray[Any, numpy.dtype[numpy.bool_]]
"""Right or not, `[texts, questions]`."""
Counts = numpy.ndarray[Any, Any]
"""Whole numbers or parts of them, text by text."""
Shown = numpy.ndarray[Any, numpy.dtype[numpy.float64]]
Tables = Mapping[str, Marks]
"""By spec."""
Families = Mapping[str, Sequence[str]]
"""Specs by family, most expensive first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A candidate's ratio of accuracies, what it kept, the ratio that is shown, and whether that will do."""

    ratio: float
    kept: float
    shown: float
    passed: bool


def ratio_shown(lost: Counts, gained: Counts, right: Counts, alpha: float) -> Shown:
    """The largest ratio of accuracies that is shown, 0 to 1, float64 `[...]`.

    Args:
        lost, gained, right: questions of each text that dense attention alone, the candidate alone, and dense attention
            has right, `[..., texts]`; one text shows nothing.
        alpha: probability with which what is shown may be too much, above 0 and below 1.
    """
    shown = numpy.minimum(_by_counts(lost, gained, right, alpha), _by_texts(right - lost + gained, right, alpha))
    return numpy.asarray(numpy.clip(shown, 0, 1), dtype=float)


def _by_counts(lost: Counts, gained: Counts, right: Counts, alpha: float) -> Shown:
    """Bound of 1 - lost / right + gained / right by exact tails, from counts `[..., texts]`."""
    most_lost = _most_lost(*_effective(lost, right), alpha)
    # gained / right are the odds of a gain among the questions that either are one or were right anyway.
    gains, questions = _effective(gained, right + gained)
    some = gains > 0
    odds = numpy.where(some, beta.ppf(_SPLIT[1] * alpha, numpy.where(some, gains, 1), questions - gains + 1), 0)
    return numpy.asarray(1 - most_lost + odds / (1 - odds))


def _most_lost(losses: Shown, answers: Shown, alpha: float) -> Shown:
    some = losses < answers  # else all are lost, or there is none
    bound = beta.ppf(1 - _SPLIT[0] * alpha, losses + 1, numpy.where(some, answers - losses, 1))
    return numpy.where(some, bound, 1)


def _effective(events: Counts, questions: Counts) -> tuple[Shown, Shown]:
    """Events and questions of all texts, divided by their design effect, from counts `[..., texts]`."""
    total, squares = questions.sum(-1), (questions.astype(float) ** 2).sum(-1)
    scale = total / numpy.maximum(total + CORRELATION * (squares - total), 1)
    return events.sum(-1) * scale, total * scale


def _by_texts(candidate: Counts, dense: Counts, alpha: float) -> Shown:
    """Fieller's bound of the ratio of means, from right answers `[..., texts]`; 0 if dense attention's may be 0."""
    texts = dense.shape[-1]
    if texts < 2:
        return numpy.zeros(dense.shape[:-1])
    spread = student.ppf(1 - alpha, texts - 1) ** 2 / (texts * (texts - 1))
    means = candidate.mean(-1), dense.mean(-1)
    off = candidate - means[0][..., None], dense - means[1][..., None]

    def term(one: int, other: int) -> Shown:
        return numpy.asarray(means[one] * means[other] - spread * (off[one] * off[other]).sum(-1))

    root = numpy.sqrt(numpy.maximum(term(0, 1) ** 2 - term(0, 0) * term(1, 1), 0))
    sure = term(1, 1) > 0
    return numpy.where(sure, (term(0, 1) - root) / numpy.where(sure, term(1, 1), 1), 0)


def judge(candidate: Marks, dense: Marks, quality: float, alpha: float) -> Verdict:
    """Whether a candidate keeps the promise, and what it is shown to keep; not if it was asked the first texts only.

    Args:
        candidate, dense: right or not, of as many questions a text.
        quality: wanted ratio of accuracies.
        alpha: see `ratio_shown`.
    """
    whole, dense = len(candidate) == len(dense), dense[: len(candidate)]
    lost, gained, right = (mask.sum(1) for mask in (dense & ~candidate, candidate & ~dense, dense))
    shown, total = float(ratio_shown(lost, gained, right, alpha)), max(right.sum(), 1)
    ratio, kept = float(candidate.sum() / total), float((right - lost).sum() / total)
    return Verdict(ratio, kept, shown, whole and shown >= quality)


def walk(families: Families, tables: Tables, dense: Marks, quality: float, alpha: float = ALPHA) -> dict[str, Verdict]:
    """Verdicts by spec, every family from its most expensive candidate down to the first that fails; behind it none."""
    verdicts: dict[str, Verdict] = {}
    for members in families.values():
        for spec in members:
            verdicts[spec] = judge(tables[spec], dense, quality, alpha / len(families))
            if not verdicts[spec].passed:
                break
    return verdicts


def cheapest(verdicts: Mapping[str, Verdict], costs: Mapping[str, float]) -> str | None:
    """The cheapest candidate that passed; None if none did."""
    passed = [spec for spec, verdict in verdicts.items() if verdict.passed]
    return min(passed, key=lambda spec: costs[spec]) if passed else None


def screen(families: Families, tables: Tables, dense: Marks, wanted: float) -> dict[str, list[str]]:
    """What a screen lets through: of every family, from its most expensive candidate down, those whose ratio of
    accuracies is at least `wanted`, up to the first whose ratio is not."""
    right = max(dense.sum(), 1)
    return {
        family: list(takewhile(lambda spec: tables[spec].sum() / right >= wanted, members))
        for family, members in families.items()
    }


def finalists(through: Families, costs: Mapping[str, float]) -> dict[str, list[str]]:
    """Whom other texts judge, of what a `screen` let through; nobody if that is nothing.

    A family's candidate is the cheapest of those; its fallback is the one above it, if there is one. Both go on from
    the two families whose candidates are cheapest.
    """
    able = [family for family, members in through.items() if members]
    going = sorted(able, key=lambda family: costs[through[family][-1]])[:FINALISTS]
    return {family: list(through[family][-RUNGS:]) for family in going}


def best_shown(texts: int, asked: int, families: int, *, losing: float = 0.0, alpha: float = ALPHA) -> float:
    """The ratio that texts of `asked` questions show, where dense attention is right and a candidate loses a share."""
    answers = numpy.float64(texts * asked / (1 + (asked - 1) * CORRELATION))
    return 1 - float(_most_lost(losing * answers, answers, alpha / families)) if texts > 1 else 0.0


def texts_needed(quality: float, asked: int, families: int, *, margin: float = 0.0, alpha: float = ALPHA) -> int:
    """The fewest texts that show a quality of a candidate that loses `margin` of what it may lose; at least two."""

    def enough(texts: int) -> bool:
        return best_shown(texts, asked, families, losing=margin * (1 - quality), alpha=alpha) >= quality

    high = 2
    while not enough(high):
        high *= 2
    return bisect_left(range(high), True, lo=max(high // 2, 2), key=enough)


def texts_to_screen(quality: float, asked: int) -> int:
    """Texts that screen: about a tenth of those that then judge."""
    return min(max(texts_needed(quality, asked, FINALISTS, margin=MARGIN) // 10, FEWEST), SCREENED)


def ratio_to_screen(quality: float, texts: int, asked: int) -> float:
    """The least ratio of accuracies that passes on the `texts` that judge, to a hundredth of what may be lost.

    A screen wants it too: who has less there would hardly pass, and take the place of one who does.
    """

    def fails(hundredths: int) -> bool:
        return best_shown(texts, asked, FINALISTS, losing=hundredths / 100 * (1 - quality)) < quality

    return 1 - (1 - quality) * bisect_left(range(1, 100), True, key=fails) / 100
