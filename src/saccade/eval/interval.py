"""Confidence intervals of shares."""

from __future__ import annotations

from scipy.stats import binomtest


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95% Wilson interval of `right` out of `count`; (0, 1) if nothing was counted."""
    if count == 0:
        return 0.0, 1.0
    interval = binomtest(right, count).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)
