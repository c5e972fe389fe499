"""A fixed number of tokens: the best by score (TidalDecode, Quest)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.topk.api import topk_and_last
from ...types import Rows, Selection
from .framed import FrameableRule


@dataclass(frozen=True, slots=True)
class TopK(FrameableRule):
    """The current token's unit and the best others, `budget` tokens in all (TidalDecode, section 3.1; Quest).

    `minimum`: fewest units of a set, whatever the budget. `keeps_last`: whether the current unit is kept unseen.
    """

    budget: int
    minimum: int = 1
    keeps_last: bool = True

    def held(self, unit: int) -> int:
        """Units in the set of a long row."""
        return max(self.budget // unit, self.minimum)

    def size(self, length: int, unit: int) -> int:
        units = -(-length // unit)
        return units if length <= self.budget else min(units, self.held(unit))

    def choose_tiled(self, scores: Tensor, tiles: Tensor | None, rows: Rows, unit: int, scale: float) -> Selection:
        return self._cut(scores, rows, unit, int(self.keeps_last), tiles)

    def cut(self, scores: Tensor, rows: Rows, unit: int, scale: float, sinks: int, window: int) -> Selection:
        """Cut float32 scores `[B, G, N]`; ties go to the lower position."""
        if sinks:
            scores[:, :, :sinks] = torch.inf
        return self._cut(scores, rows, unit, max(window, int(self.keeps_last)))

    def _cut(self, scores: Tensor, rows: Rows, unit: int, last: int, tiles: Tensor | None = None) -> Selection:
        ids, counts = topk_and_last(scores, rows.seq_lens, self.held(unit) - last, last, unit=unit, tiles=tiles)
        if self.budget % unit:
            ids, counts = whole_where_it_fits(self.budget, rows, unit, ids, counts)
        return Selection(ids, counts, unit)


def whole_where_it_fits(budget: int, rows: Rows, unit: int, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """All units of rows that fit the budget: one more than it holds if the last one is partial."""
    fits, units = rows.seq_lens <= budget, rows.units(unit)
    slot = torch.arange(ids.shape[-1] + 1, dtype=torch.int32, device=ids.device)
    whole = torch.where(slot < units[:, None], slot, -1)[:, None]
    wider = torch.nn.functional.pad(ids, (0, 1), value=-1)
    return torch.where(fits[:, None, None], whole, wider), torch.where(fits[:, None], units[:, None], counts)
