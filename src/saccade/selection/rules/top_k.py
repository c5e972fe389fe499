"""A fixed number of tokens: the best by score (TidalDecode, Quest)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.topk.api import topk_and_last
from ...types import Rows, Selection
from ..selector import Rule


@dataclass(frozen=True, slots=True)
class TopK(Rule):
    """The current token's unit and the best others, `budget` tokens in all (TidalDecode, section 3.1; Quest)."""

    budget: int
    keeps_last = True

    def size(self, length: int, unit: int) -> int:
        return -(-length // unit) if length <= self.budget else self.budget // unit

    def choose(self, scores: Tensor, rows: Rows, unit: int, scale: float) -> Selection:
        """Cut float32 scores `[B, G, N]`; ties go to the lower position."""
        ids, counts = topk_and_last(scores, rows.seq_lens, self.budget // unit - 1, 1, unit=unit)
        if self.budget % unit:
            units = (rows.seq_lens + (unit - 1)).div(unit, rounding_mode="floor")
            ids, counts = _whole_where(rows.seq_lens <= self.budget, units, ids, counts)
        return Selection(ids, counts, unit)


def _whole_where(fits: Tensor, units: Tensor, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """All `units` `[B]` of rows that fit the budget: one more than it holds if the last one is partial."""
    slot = torch.arange(ids.shape[-1] + 1, dtype=torch.int32, device=ids.device)
    whole = torch.where(slot < units[:, None], slot, -1)[:, None]
    wider = torch.nn.functional.pad(ids, (0, 1), value=-1)
    return torch.where(fits[:, None, None], whole, wider), torch.where(fits[:, None], units[:, None], counts)
