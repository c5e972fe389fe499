"""Confidence intervals of shares."""

from __future__ import annotations

from math import sqrt

Z = 1.959963984540054
"""Of 95%, both tails."""


def wilson(right: float, count: int) -> tuple[float, float]:
    """The 95% Wilson interval of `right` out of `count`; (0, 1) if nothing was counted.

    Where answers are right in part, too wide rather than too narrow: nothing from 0 to 1 varies more than yes and no.
    """
    if count == 0:
        return 0.0, 1.0
    share, weight = right / count, Z**2 / count
    middle, half = share + weight / 2, Z * sqrt(share * (1 - share) / count + weight / count / 4)
    return max((middle - half) / (1 + weight), 0.0), min((middle + half) / (1 + weight), 1.0)
