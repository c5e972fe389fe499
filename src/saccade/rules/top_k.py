"""A fixed number of tokens: the best by score (TidalDecode, Quest)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.topk.api import topk
from ..types import Rows, Selection


@dataclass(frozen=True, slots=True)
class TopK:
    """The current token's unit and the best others, `budget` tokens in all (TidalDecode, section 3.1; Quest)."""

    budget: int

    def covers(self, length: int, unit: int) -> bool:
        return length <= self.budget

    @property
    def fixed_size(self) -> bool:
        return True

    def size(self, length: int, unit: int) -> int:
        return -(-length // unit) if self.covers(length, unit) else self.budget // unit

    def choose(self, scores: Tensor, rows: Rows, unit: int, scale: float) -> Selection:
        """Cut float32 scores `[B, G, N]`; ties go to the lower position."""
        current = (rows.seq_lens - 1).div(unit, rounding_mode="floor")
        others = self.budget // unit - 1
        if others == 0:
            ids = current[:, None, None].expand(-1, scores.shape[1], 1)
            counts = torch.ones_like(ids[..., 0])
        else:
            ids, counts = _append(*topk(scores, current, others, order="position"), current)
        if self.budget % unit:
            ids, counts = _whole_where(rows.seq_lens <= self.budget, current + 1, ids, counts)
        return Selection(ids, counts, unit)


def _append(ids: Tensor, counts: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
    """Put `current` `[B]` behind the last of each ascending list `[B, G, M]`."""
    wider = torch.cat((ids, ids.new_full((*ids.shape[:2], 1), -1)), dim=-1)
    last = current[:, None, None].expand(-1, ids.shape[1], 1)
    return wider.scatter(-1, counts[..., None].long(), last), counts + 1


def _whole_where(fits: Tensor, units: Tensor, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """All `units` `[B]` of rows that fit the budget: one more than it holds if the last one is partial."""
    slot = torch.arange(ids.shape[-1] + 1, dtype=torch.int32, device=ids.device)
    whole = torch.where(slot < units[:, None], slot, -1)[:, None]
    wider = torch.nn.functional.pad(ids, (0, 1), value=-1)
    return torch.where(fits[:, None, None], whole, wider), torch.where(fits[:, None], units[:, None], counts)
