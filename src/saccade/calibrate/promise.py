"""The promise of `saccade tune`: what is chosen keeps at least a share of dense attention's, with 95% confidence, over
texts like those that judged: of its right answers, or of its likeliest tokens where key tokens are told.

What is promised is a *ratio*, right per right of dense attention. Of key tokens dense attention is right by definition,
so that nothing is gained, and the ratio is the share that stays; it has to be shown of every kind of text by itself.

What belongs to one text fails together, so texts are the units, and the ratio is shown only as far as two bounds allow:

- *By counts*: ratio = 1 - lost / right + gained / right, each by an exact binomial bound (Clopper and Pearson) that
  counts questions by their design effect (Kish; Korn and Graubard, 1998). The correlation in it is not estimated: a
  sample without a loss tells nothing of how losses cluster. It is taken to be `CORRELATION`. That is above the 0.6
  for which it is tested, because dense attention's right answers can cluster more than all answers do.
- *By texts*: Student's t over the texts' right answers, as Fieller's (1954) bound of a ratio. It holds whatever the
  correlation, but not where losses are rare and heavy: without any it would show everything. There counts decide.

With T texts of m questions and no loss, counts say as much as T m / (1 + (m - 1) CORRELATION) single questions, at
most T / CORRELATION; that is why fewer texts than `texts_needed` are refused. `python -m claims promise` simulates how
often a candidate passes that fails.

Many candidates are tried, and the cheapest that passes is taken: without a correction some would pass by luck. So some
texts put a few candidates in a `row`, and others judge these in its order down to the first that fails. The order says
nothing of the texts that judge, so that each is judged with the whole alpha (fixed-sequence testing): with probability
1 - alpha nothing passes that does not keep the promise.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy
from scipy.stats import beta
from scipy.stats import t as student

ALPHA, CORRELATION = 0.05, 0.75
_SPLIT = (0.95, 0.05)
"""Shares of alpha: losses against dense attention decide, gains hardly matter."""
MARGIN = 0.3
"""So many texts are wanted that a candidate passes that loses this share of what it may lose."""
SEARCHING, FEWEST, JUDGED = 16, 2, 4
"""Texts that put candidates in a row, at most and at least; and candidates of a row."""

Counts = numpy.ndarray[Any, Any]
"""Whole numbers or parts of them, text by text."""
Shown = numpy.ndarray[Any, numpy.dtype[numpy.float64]]
Tally = tuple[Counts, Counts, Counts]
"""Of each text: what dense attention alone, the candidate alone, and dense attention has right, `[texts]`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A candidate's ratio to dense attention, the ratio that is shown, and whether that will do."""

    ratio: float
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


def judge(tallies: Sequence[Tally], wanted: float, alpha: float = ALPHA) -> Verdict:
    """Whether a candidate keeps the promise: of every kind; of one that dense attention has nothing right of, nothing
    is shown.

    Args:
        tallies: of each kind.
        wanted: ratio.
        alpha: see `ratio_shown`. Kinds do not share it: who fails one passes no more often than one bound is wrong.
    """
    told = [(lost, gained, right) for lost, gained, right in tallies if right.sum()]
    ratio = min((float(1 + (gained.sum() - lost.sum()) / right.sum()) for lost, gained, right in told), default=0.0)
    shown = min(float(ratio_shown(*one, alpha)) if one[2].sum() else 0.0 for one in tallies)
    return Verdict(ratio, shown, shown >= wanted)


def lossless(tallies: Sequence[Tally], texts: int) -> float:
    """The ratio that so many texts show of the kind with least right answers, where nothing is lost, if these are like
    all."""
    rights = [numpy.resize(right, texts) for _, _, right in tallies]
    return min(float(ratio_shown(0 * right, 0 * right, right, ALPHA)) if right.sum() else 0.0 for right in rights)


def row(ratios: Mapping[str, float], costs: Mapping[str, float], hopeful: Callable[[float], bool]) -> list[str]:
    """Whom other texts judge, from the best one down: of those that are `hopeful` and that nothing cheaper equals, the
    best and the cheapest."""
    best, found = -1.0, list[str]()
    for spec in sorted(ratios, key=lambda spec: (costs[spec], -ratios[spec])):
        if ratios[spec] > best:
            best = ratios[spec]
            found += [spec] if hopeful(best) else []
    return [*found[JUDGED - 1 :][-1:], *found[: JUDGED - 1][::-1]]


def walk(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Who passes, from the first of a row down; nobody behind the first that fails."""
    return [*takewhile(lambda spec: verdicts[spec].passed, verdicts)]


def best_shown(texts: int, asked: int, *, losing: float = 0.0) -> float:
    """The ratio that texts of `asked` questions show, where dense attention is right and a candidate loses a share."""
    answers = numpy.float64(texts * asked / (1 + (asked - 1) * CORRELATION))
    return 1 - float(_most_lost(losing * answers, answers, ALPHA)) if texts > 1 else 0.0


def texts_needed(wanted: float, asked: int, *, margin: float = 0.0) -> int:
    """The fewest texts that show a ratio of a candidate that loses `margin` of what it may lose; at least two."""

    def enough(texts: int) -> bool:
        return best_shown(texts, asked, losing=margin * (1 - wanted)) >= wanted

    return bisect_left(range(2**31), True, lo=2, key=enough)
