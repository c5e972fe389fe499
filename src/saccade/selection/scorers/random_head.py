"""One query head's scores for all of its KV group, drawn at random: what a union is compared with (LessIsMore)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...types import KVView, Pooling
from ..selector import Index
from .exact import ExactScorer

_WORD, _FIRST, _SECOND = 2**32 - 1, 2_654_435_761, 1_540_483_477
"""Odd factors so small that no product leaves 63 bits."""


@dataclass(frozen=True, slots=True)
class RandomHeadScorer(ExactScorer):
    """Exact scores of one query head for each KV group, or one for `all` heads (LessIsMore, figure 6 and A.5.1).

    The paper does not say how often it draws. Here `seed` and a row's length decide, anew at every position; the head
    drawn has the same number in every group, so that neighbours in a batch and splits of the heads change nothing.
    """

    pooling: Pooling = "each"
    heads: Literal["kv", "all"] = "kv"
    seed: int = 0

    def score(self, q: Tensor, kv: KVView, index: Index | None, stored: Tensor | None = None) -> Tensor:
        """Scores `[B, Hkv, N]`, or `[B, 1, N]` of one head for all; see `ExactScorer.score`."""
        # `super()` does not know a class with slots, which is made twice.
        each = ExactScorer.score(self, q, kv, index, stored)
        grouped: Tensor = each.unflatten(1, (kv.kv_heads if self.heads == "kv" else 1, -1))
        drawn = self._drawn(kv.rows.seq_lens, grouped.shape[2])
        return grouped[torch.arange(len(drawn), device=drawn.device), :, drawn]

    def _drawn(self, lengths: Tensor, heads: int) -> Tensor:
        """Which of so many heads each row takes, int64 `[B]`; without a generator, so that a captured step can."""
        mixed = (lengths.long() * _FIRST + (self.seed * _SECOND & _WORD)) & _WORD
        mixed = ((mixed ^ (mixed >> 16)) * _SECOND) & _WORD
        return (mixed >> 8) % heads
