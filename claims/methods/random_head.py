"""One query head, drawn at random, chooses for its KV group: what a union is compared with (LessIsMore, figure 6)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.methods._cut import CutOptions
from saccade.methods.composed import plan
from saccade.methods.method import Method
from saccade.methods.options import FirstDense, Roles
from saccade.selection.index import Index
from saccade.selection.scorers.exact import ExactScorer
from saccade.selection.selector import ScoredSelector
from saccade.types import KVView, Pooling

_WORD, _FIRST, _SECOND = 2**32 - 1, 2_654_435_761, 1_540_483_477
"""Odd factors so small that no product leaves 63 bits."""


@dataclass(frozen=True, slots=True)
class RandomHeadScorer(ExactScorer):
    """Exact scores of one query head for each KV group.

    The paper does not say how often it draws. Here a row's length decides, anew at every position; the head drawn has
    the same number in every group, so that neighbours in a batch and splits of the heads change nothing.
    """

    pooling: Pooling = "each"

    def score(self, q: Tensor, kv: KVView, index: Index | None, stored: Tensor | None = None) -> Tensor:
        """Scores `[B, Hkv, N]`; see `ExactScorer.score`."""
        # `super()` does not know a class with slots, which is made twice.
        each = ExactScorer.score(self, q, kv, index, stored).unflatten(1, (kv.kv_heads, -1))
        mixed = kv.rows.seq_lens.long() * _FIRST & _WORD
        mixed = (mixed ^ (mixed >> 16)) * _SECOND & _WORD
        drawn = (mixed >> 8) % each.shape[2]
        found: Tensor = each[torch.arange(len(drawn), device=drawn.device), :, drawn]
        return found


class RandomHeadOptions(CutOptions):
    """Options of `random_head`."""

    roles: Roles = "select"
    """as in `composed`"""
    dense_layers: FirstDense = None

    @property
    def selector(self) -> ScoredSelector:
        return ScoredSelector(RandomHeadScorer(), self.cut)


SOURCE = "LessIsMore, arXiv 2508.07101"
METHOD = Method("random_head", "one head's best tokens", SOURCE, RandomHeadOptions, plan, compared=False, tuned=())
