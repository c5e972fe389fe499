"""Units ranked by the attention that their scores promise, instead of by the largest score of a group's heads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import KVView, Rows, Selection
from .index import Index
from .selector import ScoredSelector


@dataclass(frozen=True, slots=True)
class MassSelector(ScoredSelector):
    """One set per KV head, cut from masses: each query head's softmax over a row's units, summed over the group.

    The scorer's pooling must be "each".
    """

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        each = self.scorer.score(q, kv, index, scores)
        # Of a unit that is kept unseen nothing need be known.
        mass = masses(each, kv.rows, self.scorer.unit, scale, unseen=int(self.rule.keeps_last))
        return self.rule.choose(mass.unflatten(1, (kv.kv_heads, -1)).sum(dim=2), kv.rows, self.scorer.unit, scale)


def masses(scores: Tensor, rows: Rows, unit: int, scale: float, unseen: int) -> Tensor:
    """Softmax of `scale * scores` `[B, G, N]` over each row's units, the last `unseen` left out; there it is 0."""
    absent = torch.arange(scores.shape[-1], device=scores.device) >= (rows.units(unit) - unseen)[:, None]
    logits = (scores * scale).masked_fill(absent[:, None], torch.finfo(scores.dtype).min)
    return logits.softmax(dim=-1).masked_fill(absent[:, None], 0)
