"""How sure a share is, counted text by text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scipy.stats import bootstrap


def share_interval(some: Sequence[int], of: Sequence[int]) -> tuple[float, float] | None:
    """95% of `sum(some) / sum(of)` by resampling texts (percentile bootstrap); None of fewer than three."""
    if len(some) < 3:
        return None

    def share(some: Any, of: Any, axis: int = -1) -> Any:
        return some.sum(axis) / of.sum(axis)

    found = bootstrap((some, of), share, paired=True, vectorized=True, method="percentile", rng=0).confidence_interval
    return float(found.low), float(found.high)
