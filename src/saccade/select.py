"""The selection protocols: an index that scores, a rule that cuts, and the selector made of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .errors import PolicyError
from .types import HeadGrouping, KVView, Pooling, Rows, Selection


class Index(Protocol):
    """What a selector keeps per layer beside the cache."""

    def update(self, kv: KVView, start: Tensor, count: int) -> None:
        """Bring up to date with logical positions `start..start + count` (start int32 `[B]`) of the cache."""
        ...

    def permute(self, rows: Tensor) -> None:
        """Let new batch row `i` be what row `rows[i]` was (int64 `[B']`)."""
        ...

    def heads(self, start: int, stop: int) -> Index:
        """The same index narrowed to KV heads `start..stop`; shares memory."""
        ...

    @property
    def nbytes(self) -> int: ...


class Scorer(Protocol):
    """Gives every unit (token or page) of a row a float32 score, higher is better."""

    @property
    def unit(self) -> int: ...

    @property
    def pooling(self) -> Pooling: ...

    @property
    def fused(self) -> bool:
        """Whether dense attention computes these very scores anyway, so that a PUBLISH layer gets them for free."""
        ...

    def new_index(self, kv: KVView) -> Index | None: ...

    def score(self, q: Tensor, kv: KVView, index: Index | None) -> Tensor:
        """Scores float32 `[B, G, N]` in logical order for q `[B, Hq, d]`; -inf past the row's end."""
        ...


class Rule(Protocol):
    """Cuts scores into a set."""

    def choose(self, scores: Tensor, rows: Rows, unit: int) -> Selection: ...

    def covers(self, length: int, unit: int) -> bool:
        """Whether a row of `length` tokens is always chosen whole."""
        ...


class Selector(Protocol):
    """Chooses the set that heads attend to. Frozen: all that changes lives in the index."""

    @property
    def heads(self) -> HeadGrouping: ...

    @property
    def fused_pooling(self) -> Pooling | None:
        """The pooling under which dense attention should store its scores, None if they are of no use."""
        ...

    def covers(self, length: int) -> bool: ...

    def new_index(self, kv: KVView) -> Index | None: ...

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None) -> Selection:
        """The set for q `[B, Hq, d]`; `scores` are those stored by dense attention, if it ran just before."""
        ...


@dataclass(frozen=True, slots=True)
class ScoredSelector:
    """A scorer and a rule: tokens by exact scores, pages by bounds, and whatever scores units of equal size."""

    scorer: Scorer
    rule: Rule
    heads: HeadGrouping = "kv"

    @property
    def fused_pooling(self) -> Pooling | None:
        return self.scorer.pooling if self.scorer.fused else None

    def covers(self, length: int) -> bool:
        return self.rule.covers(length, self.scorer.unit)

    def new_index(self, kv: KVView) -> Index | None:
        return self.scorer.new_index(kv)

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None) -> Selection:
        if scores is None:
            scores = self.scorer.score(q, kv, index)
        return self.rule.choose(scores, kv.rows, self.scorer.unit)


@dataclass(frozen=True, slots=True)
class WindowSelector:
    """The first `sinks` tokens and the most recent ones, `budget` in all (StreamingLLM); content plays no part."""

    budget: int
    sinks: int
    heads: HeadGrouping = "all"

    def __post_init__(self) -> None:
        if self.budget < self.sinks + 1:
            raise PolicyError(
                f"budget={self.budget} cannot hold {self.sinks} sinks and the current token; "
                f"the smallest is {self.sinks + 1}"
            )

    @property
    def fused_pooling(self) -> Pooling | None:
        return None

    def covers(self, length: int) -> bool:
        return length <= self.budget

    def new_index(self, kv: KVView) -> Index | None:
        return None

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None) -> Selection:
        lengths = kv.rows.seq_lens[:, None]
        slot = torch.arange(self.budget, dtype=torch.int32, device=lengths.device)[None]
        recent = lengths - self.budget + slot
        ids = torch.where((slot < self.sinks) | (lengths <= self.budget), slot, recent)
        ids = torch.where(slot < lengths, ids, -1)
        return Selection(ids[:, None], lengths.clamp(max=self.budget))


def pooling_of(heads: HeadGrouping) -> Pooling:
    """Scores that a grouping needs: one per query head unless a KV group shares its maximum."""
    return "max" if heads == "kv" else "each"
