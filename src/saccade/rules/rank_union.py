"""One set for all heads: the union of their rankings, rank by rank (LessIsMore)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import floor

import torch
from torch import Tensor

from ..errors import PolicyError
from ..kernels.rank_union.api import rank_union
from ..kernels.topk.api import topk
from ..types import Rows, Selection


@dataclass(frozen=True, slots=True)
class RankUnion:
    """LessIsMore's set: sinks, a recent window and the rank-ordered union of the heads' rankings (3.1.1, 3.1.2).

    With R = floor(budget * recent), raised to sinks + 1, the window holds R - sinks tokens; budget - R are chosen.
    """

    budget: int
    sinks: int
    recent: float

    def __post_init__(self) -> None:
        if self.budget < self.sinks + 2:
            raise PolicyError(
                f"budget={self.budget} cannot hold {self.sinks} sinks, the current token and one chosen token; "
                f"the smallest is {self.sinks + 2}"
            )

    @property
    def reserved(self) -> int:
        return _reserved(self.budget, self.sinks, self.recent)

    @property
    def window(self) -> int:
        return self.reserved - self.sinks

    @property
    def chosen(self) -> int:
        return self.budget - self.reserved

    def covers(self, length: int, unit: int) -> bool:
        return length <= self.budget

    @property
    def fixed_size(self) -> bool:
        return True

    def size(self, length: int, unit: int) -> int:
        return min(length, self.budget)

    def choose(self, scores: Tensor, rows: Rows, unit: int, scale: float) -> Selection:
        """One set per row from scores float32 `[B, Hq, N]`."""
        lengths = rows.seq_lens
        candidates = (lengths - self.reserved).clamp(min=0)
        middle = scores[:, :, self.sinks :]
        chosen = middle.new_empty((lengths.shape[0], 1, 0), dtype=torch.int32)
        counts = torch.zeros_like(lengths)[:, None]
        if self.chosen > 0 and middle.shape[-1] > 0:
            ranked, ranked_counts = topk(middle, candidates, self.chosen, order="score")
            chosen, counts = rank_union(ranked, ranked_counts, limit=self.chosen, universe=middle.shape[-1])
            chosen = torch.where(chosen >= 0, chosen + self.sinks, chosen)
        return Selection(*_frame(chosen, counts, lengths, self.sinks, self.window))


@cache
def _reserved(budget: int, sinks: int, recent: float) -> int:
    """R of the paper; the share is taken as it was written, in decimals."""
    return max(floor(budget * Fraction(str(recent))), sinks + 1)


def _frame(chosen: Tensor, counts: Tensor, lengths: Tensor, sinks: int, window: int) -> tuple[Tensor, Tensor]:
    """Sinks, then `chosen` `[B, 1, M]`, then the last `window` tokens, which never overlap however short the row."""
    lengths = lengths[:, None]
    sink_counts = lengths.clamp(max=sinks)
    window_counts = (lengths - sink_counts).clamp(max=window)
    total = sink_counts + counts + window_counts
    slot = torch.arange(sinks + chosen.shape[-1] + window, dtype=torch.int32, device=lengths.device)[None]
    middle = slot - sink_counts
    recent = lengths - total + slot
    picked = (
        chosen[:, 0].gather(-1, middle.clamp(0, max(chosen.shape[-1] - 1, 0)).long()) if chosen.shape[-1] else middle
    )
    ids = torch.where(slot < sink_counts, slot, torch.where(middle < counts, picked, recent))
    return torch.where(slot < total, ids, -1)[:, None], total
