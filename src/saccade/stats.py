"""What `run.stats()` returns: plain numbers, read from the device when asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .counters import Counters


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Means over decode steps, heads and rows of one layer.

    Attributes:
        steps: decoded tokens seen by this layer.
        tokens: tokens attended to per step.
        share: share of the row attended to, 0..1.
        recall: attention recall 0..1, None unless it was asked for.
    """

    steps: int
    tokens: float
    share: float
    recall: float | None


@dataclass(frozen=True, slots=True)
class RunStats:
    """Everything a run has counted so far."""

    policy: str
    layers: tuple[LayerStats, ...]
    index_bytes: int

    @classmethod
    def of(cls, policy: str, counters: Counters, recall: list[float | None] | None, index_bytes: int) -> RunStats:
        layers = []
        for layer, (tokens, share) in enumerate(counters.totals()):
            steps = counters.steps[layer]
            mean = (tokens / steps, share / steps) if steps else (0.0, 0.0)
            layers.append(LayerStats(round(steps), *mean, recall[layer] if recall else None))
        return cls(policy, tuple(layers), index_bytes)

    @property
    def steps(self) -> int:
        """Decode steps, counted per batch."""
        return max((layer.steps for layer in self.layers), default=0)

    @property
    def share_attended(self) -> float | None:
        """Mean share of the cache attended to, over all layers and heads; None before the first decoded token."""
        return self._mean([layer.share for layer in self.layers]) if self.steps else None

    @property
    def recall(self) -> float | None:
        """Mean attention recall over layers; None unless it was asked for."""
        values = [layer.recall for layer in self.layers if layer.recall is not None]
        return self._mean(values) if values else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the derived means."""
        means = {"steps": self.steps, "share_attended": self.share_attended, "recall": self.recall}
        return {**asdict(self), **means}

    @staticmethod
    def _mean(values: list[float]) -> float:
        return sum(values) / len(values)
