"""Exact scores: q·k of every cached token, which dense attention computes anyway (TidalDecode, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..kernels.dense_decode_scores.api import decode_scores
from ..select import Index
from ..types import KVView, Pooling


@dataclass(frozen=True, slots=True)
class ExactScorer:
    """Scores tokens by q·k in float32 from the cached keys; needs no index."""

    pooling: Pooling = "max"

    @property
    def unit(self) -> int:
        return 1

    @property
    def fused(self) -> bool:
        return True

    def new_index(self, kv: KVView) -> None:
        return None

    def score(self, q: Tensor, kv: KVView, index: Index | None) -> Tensor:
        return decode_scores(q, kv, pooling=self.pooling)
