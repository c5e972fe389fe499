"""Units ranked by the attention that their scores promise, instead of by the largest score of a group's heads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import KVView, Selection
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
        seen = kv.rows.units(self.scorer.unit) - int(self.rule.keeps_last)
        absent = (torch.arange(each.shape[-1], device=each.device) >= seen[:, None])[:, None]
        logits = (each * scale).masked_fill(absent, torch.finfo(each.dtype).min)
        mass = logits.softmax(dim=-1).masked_fill(absent, 0)
        return self.rule.choose(mass.unflatten(1, (kv.kv_heads, -1)).sum(dim=2), kv.rows, self.scorer.unit, scale)
