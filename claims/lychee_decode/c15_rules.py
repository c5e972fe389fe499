"""Keeping a ratio of the text is best at equal sparsity; top-p and ratio fall sharply at extreme sparsity."""

from ..designs.questions import Questions
from ..judging.claim import LYCHEE_DECODE, Claim, Group, Source, Test

RATIO, TOP_P = "lychee_decode:rule=ratio,ratio={}", "lychee_decode:rule=top_p,budget=8192,top_p={}"
KEPT = {0.3: 1229, 0.2: 819, 0.1: 410}
"""Ratios of table 5, and budgets that are as much of a text of mean length."""


def _drop(rule: str, least: float, most: float, reported: float) -> Test:
    effect = f"right answers, {rule.format(least)} minus {rule.format(most)}"
    few, many = Group(rule.format(least)), Group(rule.format(most))
    return Test(effect, "right", few, many, direction="below", bound=-0.02, reported=reported)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_DECODE, "figure 5, tables 5 and 6"),
    settings=Questions(
        arms=(
            *map(RATIO.format, KEPT),
            *(f"lychee_decode:budget={tokens}" for tokens in KEPT.values()),
            *map(TOP_P.format, (0.99, 0.999)),
        ),
        lengths=(1024, 7168),
    ),
    tests=(
        Test(
            "right answers, a ratio minus as many tokens on the mean",
            "right",
            Group(RATIO.format("*")),
            Group("lychee_decode:budget=*"),
        ),
        _drop(TOP_P, 0.99, 0.999, reported=-0.05),
        _drop(RATIO, 0.1, 0.3, reported=-0.025),
    ),
    instrument="a model and a task on which some of these budgets lose answers",
)
