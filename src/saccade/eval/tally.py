"""What is added up for one entry of a comparison, and the row it becomes."""

from __future__ import annotations

from statistics import median
from typing import Any

from ..recall import RecallObserver
from ..stats import RunStats
from .entry import Entry
from .interval import wilson


class Tally:
    """Sums over all questions of one entry.

    Args:
        layers: decoder layers of the model.
    """

    def __init__(self, entry: Entry, layers: int) -> None:
        self.entry = entry
        self.recall = RecallObserver(layers)
        self.seconds: list[float] = []
        self._correct = 0
        self._count = 0
        self._facts_held: list[float] = []
        self._steps = 0
        self._share = 0.0

    def add_answer(self, correct: bool, fact_held: float | None) -> None:
        """Count one question."""
        self._count += 1
        self._correct += correct
        if fact_held is not None:
            self._facts_held.append(fact_held)

    def add_run(self, stats: RunStats) -> None:
        """Count what a run over one context attended to."""
        share = stats.share_attended
        if share is not None:
            self._steps += stats.steps
            self._share += share * stats.steps

    def row(self, baseline_seconds: float | None) -> dict[str, Any]:
        """The row of `results.json`; what was not measured yet is null.

        Args:
            baseline_seconds: median of the dense baseline's steps.
        """
        per_layer = self.recall.per_layer()
        known = [value for value in per_layer if value is not None]
        seconds = median(self.seconds) if self.seconds else None
        return {
            "policy": self.entry.policy.name,
            "budget": self.entry.policy.budget,
            "label": self.entry.label,
            "spec": self.entry.spec,
            "share_attended": self._share / self._steps if self._steps else None,
            "recall": sum(known) / len(known) if known else None,
            "recall_per_layer": per_layer,
            "fact_held": sum(self._facts_held) / len(self._facts_held) if self._facts_held else None,
            "correct": self._correct,
            "n": self._count,
            "interval": wilson(self._correct, self._count),
            "ms_per_token": None if seconds is None else 1e3 * seconds,
            "speedup": None if seconds is None or baseline_seconds is None else baseline_seconds / seconds,
            "timed_tokens": len(self.seconds),
        }
