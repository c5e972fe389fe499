"""What `run.stats()` returns: plain numbers, read from the device when asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .counters import COUNTING, Counters
from .recall import MeanRecall, RecallObserver


@dataclass(slots=True)
class Rectifications:
    """What dense passes over sparse steps have done (ReSA, section 2.2 and appendix B); a batch counts once.

    Attributes:
        passes: dense passes; each also decodes one token of its own.
        rewritten: tokens that passes have run again, so that their keys and values are dense.
        drafted: tokens that sparse steps have proposed to a verifying pass.
        accepted: those of them that stood.
    """

    passes: int = 0
    rewritten: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, *, passes: int = 0, rewritten: int = 0, drafted: int = 0, accepted: int = 0) -> None:
        """Count more; any thread may."""
        with COUNTING:
            self.passes, self.rewritten = self.passes + passes, self.rewritten + rewritten
            self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Means over decode steps, heads and rows of one layer.

    Attributes:
        steps: decoded tokens seen by this layer.
        tokens: tokens attended to per step.
        share: share of the row attended to, 0..1.
        recall, token_recall: attention and token recall 0..1 over heads with a set (see `MeanRecall`); None unless they
            were asked for, and where no head has one.
        heads_with_set: share of the heads 0..1 that have one; None unless recall was asked for.
        overflow: share of sets 0..1 for which the rule wanted more than their buffer holds.
    """

    steps: int
    tokens: float
    share: float
    recall: float | None
    token_recall: float | None
    heads_with_set: float | None
    overflow: float


@dataclass(frozen=True, slots=True)
class RunStats:
    """Everything a run has counted so far.

    Attributes:
        policy: its spec.
        layers: means of each layer, 0 for those without full attention.
        index_bytes: what indexes hold beside the present cache.
        build_seconds: time that building the present cache's indexes took, later updates excluded.
        dense_passes, rectifications, drafted, accepted: as of `Rectifications`.
    """

    policy: str
    layers: tuple[LayerStats, ...]
    index_bytes: int
    build_seconds: float = 0.0
    dense_passes: int = 0
    rectifications: int = 0
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(
        cls,
        policy: str,
        counters: Counters,
        recall: RecallObserver | None,
        *,
        index_bytes: int = 0,
        build_seconds: float = 0.0,
        rectification: Rectifications | None = None,
    ) -> RunStats:
        """Read the counters, and what `recall` has measured and `rectification` done, if they were there."""
        recalls = dict(enumerate(recall.per_layer())) if recall is not None else {}
        layers = []
        for layer, (*sums, steps) in enumerate(counters.totals()):
            tokens, share, overflow = (value / steps for value in sums) if steps else (0.0, 0.0, 0.0)
            attention, token, with_set = recalls.get(layer) or (None, None, None)
            layers.append(LayerStats(round(steps), tokens, share, attention, token, with_set, overflow))
        done = rectification or Rectifications()
        counts = done.passes, done.rewritten, done.drafted, done.accepted
        return cls(policy, tuple(layers), index_bytes, build_seconds, *counts)

    @property
    def steps(self) -> int:
        """Decode steps, counted per batch, dense passes among them."""
        return self.sparse_steps + self.dense_passes

    @property
    def sparse_steps(self) -> int:
        """Decode steps under the policy; what `layers` are means of."""
        return max((layer.steps for layer in self.layers), default=0)

    @property
    def share_attended(self) -> float | None:
        """Mean share of the cache attended to, over all layers, heads and steps; None before the first decoded token.

        A dense pass attends to everything. Layers without full attention do not count.
        """
        if not self.steps:
            return None
        sparse = _mean([layer.share for layer in self.layers if layer.steps]) or 0.0
        return (sparse * self.sparse_steps + self.dense_passes) / self.steps

    @property
    def recall(self) -> float | None:
        """Mean attention recall over heads with a set; None unless it was asked for, and where no head has one."""
        return self._recall and self._recall.attention

    @property
    def token_recall(self) -> float | None:
        """Mean token recall over heads with a set; None unless it was asked for, and where no head has one."""
        return self._recall and self._recall.token

    @property
    def recall_with_dense(self) -> float | None:
        """Mean attention recall with dense heads as 1; None unless it was asked for."""
        return self._recall and self._recall.with_dense[0]

    @property
    def token_recall_with_dense(self) -> float | None:
        """Mean token recall with dense heads as 1; None unless it was asked for."""
        return self._recall and self._recall.with_dense[1]

    @property
    def _recall(self) -> MeanRecall | None:
        measured = ((one.recall, one.token_recall, one.heads_with_set) for one in self.layers)
        layers = [MeanRecall(attention, token, share) for attention, token, share in measured if share is not None]
        return MeanRecall.over(layers) if layers else None

    @property
    def overflow(self) -> float | None:
        """Mean share of sets that did not fit their buffer, over layers; None before the first decoded token."""
        return _mean([layer.overflow for layer in self.layers if layer.steps]) if self.steps else None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of drafted tokens that stood; None unless tokens were drafted and verified."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_dense_pass(self) -> float | None:
        """Tokens that a dense pass settles, its own among them; None before the first pass."""
        if not self.dense_passes:
            return None
        return 1 + (self.accepted if self.drafted else self.rectifications) / self.dense_passes

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the derived means."""
        return {**asdict(self), **{name: getattr(self, name) for name in _DERIVED}}


_DERIVED = (
    *("steps", "share_attended", "recall", "recall_with_dense", "token_recall", "token_recall_with_dense", "overflow"),
    *("acceptance_rate", "tokens_per_dense_pass"),
)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
