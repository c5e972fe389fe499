"""Which HardKuma gates stand for the paper's: decided by a rule that was written before any run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from saccade.calibrate.training import LETTER
from saccade.errors import SaccadeError

from .variants import DIRECT, SCALED

Results = Mapping[str, Any]
NEAR = 1.0
"""Gates by which the expected number of open ones may miss the wanted one, in every seed."""
KEPT = 0.98
"""Of the answers that direct gates keep, cut to as many heads, what must be kept too."""


def chosen(results: Results) -> str:
    """The variant with most right answers among those that reach the wanted number and keep direct gates' answers.

    If none does, the paper's letter. Answers are those of exactly as many heads as wanted, all seeds and budgets.

    Raises:
        SaccadeError: nothing was asked yet, or direct gates are not among the runs.
    """
    least = KEPT * _right(results, DIRECT)
    reaching = [name for name in SCALED if _reaches(results, name)]
    able = {name: right for name in reaching if (right := _right(results, name)) >= least}
    return max(able, key=lambda name: able[name]) if able else LETTER


def _reaches(results: Results, variant: str) -> bool:
    """Whether all seeds were trained to the end and came near enough."""
    runs = [run for run in results["runs"] if run["variant"] == variant]
    ended = len(runs) == results["seeds"] and all(run["step"] == results["steps"] for run in runs)
    return ended and all(abs(run["expected_l0"] - results["target"]) <= NEAR for run in runs)


def _right(results: Results, variant: str) -> float:
    """Share of right answers."""
    rows: Iterable[Results] = results.get("answers", {}).get("rows", ())
    own = [row["right"] for row in rows if (row["variant"], row["roles"]) == (variant, "exact")]
    if not own:
        raise SaccadeError(f"no answers of {variant} gates: `python -m claims roles FILE` asks for them")
    return fmean(right for texts in own for right in texts)
