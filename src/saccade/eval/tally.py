"""What is added up for one policy of a comparison, and the row it becomes."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from ..decode.recall import RecallRecords
from ..decode.stats import RunStats
from ..methods.policy import Policy
from .entry import label
from .interval import wilson

LayerRecalls = tuple[list[float], list[float]]
"""Attention and token recall of one token, layer by layer."""


def recalls_of(records: RecallRecords) -> list[LayerRecalls]:
    """Recalls of every token as means over heads."""
    # A head that attends to everything has both recalls by definition.
    attention, token = (values.nan_to_num(1.0).mean(-1).tolist() for values in (records.attention, records.token))
    return list(zip(attention, token, strict=True))


class Tally:
    """Sums over all questions of one policy.

    Attributes:
        seconds: steps of the timing pass.
        pass_seconds: those of its steps that rectified the ones before them.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.seconds: list[float] = []
        self.pass_seconds: list[float] = []
        self._correct = 0
        self._count = 0
        self._facts_held: list[float] = []
        self._recalls: list[LayerRecalls] = []
        self._steps = self._sparse_steps = 0
        self._share = 0.0
        self._overflow = 0.0
        self._index_bytes: list[int] = []
        self._build_seconds: list[float] = []

    def add_answer(self, correct: bool, fact_held: float | None, recalls: list[LayerRecalls]) -> None:
        """Count one question."""
        self._recalls += recalls
        self._count += 1
        self._correct += correct
        if fact_held is not None:
            self._facts_held.append(fact_held)

    def add_run(self, stats: RunStats) -> None:
        """Count what a run over one context attended to, and what it kept beside the cache."""
        if stats.share_attended is None or stats.overflow is None:
            return
        # A dense pass decodes a token too, and that one attends to everything.
        self._steps += stats.steps
        self._share += stats.share_attended * stats.steps
        self._sparse_steps += stats.sparse_steps
        self._overflow += stats.overflow * stats.sparse_steps
        self._index_bytes.append(stats.index_bytes)
        self._build_seconds.append(stats.build_seconds)

    def row(self, baseline_seconds: float | None) -> dict[str, Any]:
        """The row of `results.json`; what was not measured yet is null.

        Args:
            baseline_seconds: median of the dense baseline's steps.
        """
        attention, token = (_per_layer([recalls[kind] for recalls in self._recalls]) for kind in (0, 1))
        seconds = self.seconds_per_token
        return {
            "policy": self.policy.name,
            "budget": self.policy.budget,
            "label": label(self.policy),
            "spec": str(self.policy),
            "share_attended": self._share / self._steps if self._steps else None,
            "recall": fmean(attention) if attention else None,
            "recall_per_layer": attention,
            "token_recall": fmean(token) if token else None,
            "token_recall_per_layer": token,
            "overflow": self._overflow / self._sparse_steps if self._sparse_steps else None,
            "index_bytes": max(self._index_bytes, default=None),
            "build_seconds": fmean(self._build_seconds) if self._build_seconds else None,
            "fact_held": fmean(self._facts_held) if self._facts_held else None,
            "correct": self._correct,
            "n": self._count,
            "interval": wilson(self._correct, self._count),
            "ms_per_token": None if seconds is None else 1e3 * seconds,
            "speedup": None if seconds is None or baseline_seconds is None else baseline_seconds / seconds,
            "timed_tokens": len(self.seconds) + len(self.pass_seconds),
        }

    @property
    def seconds_per_token(self) -> float | None:
        """Median of the timed steps; with dense passes among them, the mean over one round of both kinds' medians."""
        sparse = self.policy.phase.period - 1
        if not self.seconds or (sparse and not self.pass_seconds):
            return None
        if not sparse:
            return median(self.seconds)
        return (sparse * median(self.seconds) + median(self.pass_seconds)) / (sparse + 1)


def _per_layer(tokens: list[list[float]]) -> list[float]:
    """Means over tokens; empty if there are none."""
    return [fmean(layer) for layer in zip(*tokens, strict=True)]
