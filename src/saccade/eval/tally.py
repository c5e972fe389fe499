"""What is added up for one policy of a comparison, and the row it becomes."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch

from ..decode.recall import MeanRecall, Recall
from ..decode.stats import RunStats
from ..methods.policy import Policy
from .divergence import Divergence
from .interval import wilson

LayerRecalls = list[MeanRecall | None]
"""Recalls of one token, layer by layer as the model counts them; None where a layer has no full attention."""


def recalls_of(records: Recall, layers: Sequence[int]) -> list[LayerRecalls]:
    """Recalls of every token as means over heads with a set; `layers` are those of the model's that were measured."""
    shares = (~records.attention.isnan()).float().mean(-1)
    tokens = torch.stack((records.attention.nanmean(-1), records.token.nanmean(-1), shares), -1).tolist()
    none = MeanRecall(None, None, 0.0)
    measured = ([MeanRecall(*layer) if layer[2] else none for layer in token] for token in tokens)
    placed = (dict(zip(layers, token, strict=True)) for token in measured)
    return [[token.get(layer) for layer in range(layers[-1] + 1)] for token in placed]


class Tally:
    """Sums over all questions of one policy.

    Attributes:
        seconds: steps of the timing pass.
        pass_seconds: those of its steps that rectified the ones before them.
        told: of each text that was probed, its `record`.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.seconds: list[float] = []
        self.pass_seconds: list[float] = []
        self.told: list[Mapping[str, Any]] = []
        self._correct: float = 0
        self._count = 0
        self._tokens = 0
        self._facts_held: list[float] = []
        self._recalls: list[LayerRecalls] = []
        self._runs: list[RunStats] = []

    def add_answer(self, correct: float, tokens: int, fact_held: float | None, recalls: list[LayerRecalls]) -> None:
        """Count one question, right, wrong or in part, whose answer was so many tokens long."""
        self._recalls += recalls
        self._count += 1
        self._tokens += tokens
        self._correct += correct
        if fact_held is not None:
            self._facts_held.append(fact_held)

    def add_run(self, stats: RunStats) -> None:
        """Count what a run over one context attended to, and what it kept beside the cache."""
        if stats.steps:
            self._runs.append(stats)

    def row(self, baseline_seconds: float | None) -> dict[str, Any]:
        """The row of `results.json`, given the median of the dense baseline's steps; null: not measured yet."""
        seconds = self.seconds_per_token
        row: dict[str, Any] = {
            "policy": self.policy.name,
            "budget": self.policy.budget,
            "spec": str(self.policy),
            # A dense pass decodes a token too, and that one attends to everything.
            "share_attended": _mean([(run.share_attended, run.steps) for run in self._runs]),
            **MeanRecall.row([MeanRecall.of_parts(layer) for layer in zip(*self._recalls, strict=True)]),
            "overflow": _mean([(run.overflow, run.sparse_steps) for run in self._runs]),
            "index_bytes": max((run.index_bytes for run in self._runs), default=None),
            "build_seconds": fmean(run.build_seconds for run in self._runs) if self._runs else None,
            "fact_held": fmean(self._facts_held) if self._facts_held else None,
            "answer_tokens": self._tokens / self._count if self._count else None,
            "correct": self._correct,
            "n": self._count,
            "interval": wilson(self._correct, self._count),
            "ms_per_token": None if seconds is None else 1e3 * seconds,
            "speedup": None if seconds is None or baseline_seconds is None else baseline_seconds / seconds,
            "timed_tokens": len(self.seconds) + len(self.pass_seconds),
        }
        if self.told:
            probed = Divergence(str(self.policy), self.told)
            row |= {"key_divergence": probed.merit if probed.keys else None, "key_interval": probed.interval()}
            row["key_tokens"] = probed.keys
        return row

    @property
    def seconds_per_token(self) -> float | None:
        """Median of the timed steps; with dense passes among them, the mean over one round of both kinds' medians."""
        sparse = self.policy.phase.period - 1
        if not self.seconds or (sparse and not self.pass_seconds):
            return None
        if not sparse:
            return median(self.seconds)
        return (sparse * median(self.seconds) + median(self.pass_seconds)) / (sparse + 1)


def _mean(weighted: list[tuple[float | None, int]]) -> float | None:
    """Mean of values by their weights; None if there is no weight."""
    weight = sum(count for _, count in weighted)
    return sum(value * count for value, count in weighted if value is not None) / weight if weight else None
