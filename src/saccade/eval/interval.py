"""Confidence intervals of shares."""

from math import ceil, floor

from scipy.stats import binomtest

DIGITS = 9
"""Of a sum of scores that count: what adding has rounded is no part of an answer."""


def wilson(right: float, count: int) -> tuple[float, float]:
    """The 95% Wilson interval of `right` out of `count`; (0, 1) if nothing was counted.

    Where answers are right in part, it reaches from the interval of the whole number below to that of the one above:
    too wide rather than too narrow, since nothing from 0 to 1 varies more than yes and no.
    """
    if count == 0:
        return 0.0, 1.0
    right = round(right, DIGITS)
    low, high = (
        binomtest(whole, count).proportion_ci(confidence_level=0.95, method="wilson")
        for whole in (floor(right), ceil(right))
    )
    return float(low.low), float(high.high)
