"""One set for all heads: the union of their rankings, rank by rank (LessIsMore)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import floor

import torch
from torch import Tensor

from ...errors import PolicyError
from ...kernels.rank_union.api import framed, framed_rank_union
from ...kernels.topk.api import topk
from ...types import Rows, Selection
from ..selector import Rule
from .framed import units_of
from .top_k import whole_where_it_fits

_AGREEING = 4
"""So many heads may agree on every token before more than their first ranks are asked for."""


@dataclass(frozen=True, slots=True)
class RankUnion(Rule):
    """LessIsMore's set: `sinks`, a recent `window` and the rank-ordered union of the heads' rankings (3.1.1, 3.1.2).

    `reserved`: R = floor(`budget` * `recent`), at least sinks + 1; the window holds R - sinks; budget - R are `chosen`.
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

    keeps_last = True

    def size(self, length: int, unit: int) -> int:
        return -(-length // unit) if length <= self.budget else self.budget // unit

    def frame(self, length: int, unit: int) -> tuple[int, int]:
        pages = self.over(unit)
        return pages.sinks * unit, pages.window * unit

    def over(self, unit: int) -> RankUnion:
        """The same rule over pages, counted in pages: as many as hold the sinks, and what fits the budget."""
        return self if unit == 1 else RankUnion(self.budget // unit, units_of(self.sinks, unit), self.recent)

    def choose(self, scores: Tensor, rows: Rows, unit: int, scale: float) -> Selection:
        """One set per row from scores float32 `[B, Hq, N]` of tokens or pages."""
        ids, counts = self.over(unit)._merged(scores, rows.units(unit))
        if self.budget % unit:
            ids, counts = whole_where_it_fits(self.budget, rows, unit, ids, counts)
        return Selection(ids, counts, unit)

    def _merged(self, scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        middle = scores[:, :, self.sinks :]
        if self.chosen == 0 or middle.shape[-1] == 0:
            nothing = torch.zeros_like(lengths)[:, None]
            return framed(nothing[..., None][..., :0], nothing, lengths, self.sinks, self.window)
        # Of a row that fits nothing need be ranked.
        longer = lengths * (lengths > self.budget)
        first = min(-(-_AGREEING * self.chosen // scores.shape[1]), self.chosen)

        def ranked(lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
            return topk(middle, lengths, count, order="score", reserved=self.reserved)

        return framed_rank_union(
            *ranked(longer, first),
            lengths,
            self.chosen,
            sinks=self.sinks,
            window=self.window,
            universe=middle.shape[-1],
            rest=None if first == self.chosen else lambda short: ranked(short, self.chosen),
        )


@cache
def _reserved(budget: int, sinks: int, recent: float) -> int:
    """R of the paper; the share is taken as it was written, in decimals."""
    return max(floor(budget * Fraction(str(recent))), sinks + 1)
