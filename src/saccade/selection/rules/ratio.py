"""A share of the row: the set grows with the sequence (ReSA, equation 4; LycheeDecode, section 4.2.2)."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from ...errors import PolicyError
from ...kernels._share import Share
from ...kernels.topk.api import topk_and_last
from ...types import Rows, Selection
from .framed import FrameableRule, frame_of, keep_frame

_MOST_UNITS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Ratio(FrameableRule):
    """Of M units, n = min(M, max(`minimum`, ceil(M * kept))): the last `local` ones and the best others.

    `kept` is the share that stays, as it was written in decimals: 0.1 of 30 is exactly 3. `framed`: the others begin
    with the sinks and the window of a set of n (`framed.frame_of`).

    Raises:
        PolicyError: at construction, if the last `local` units are more than the smallest set holds.
    """

    kept: float
    minimum: int = 1
    local: int = 1
    framed: bool = False
    keeps_last = True

    def __post_init__(self) -> None:
        if not 1 <= self.local <= self.minimum:
            raise PolicyError(
                f"local_pages={self.local} is not valid: at least 1 and at most min_pages, which is {self.minimum}"
            )

    @property
    def share(self) -> Share:
        """What is kept of a row, in whole numbers."""
        return _share(self.kept, self.minimum)

    def size(self, length: int, unit: int) -> int:
        return self.share.of(-(-length // unit))

    def frame(self, length: int, unit: int) -> tuple[int, int]:
        sinks, window = frame_of(self.size(length, unit) * unit, unit) if self.framed else (0, 0)
        return sinks, max(window, self.local * unit)

    def cut(self, scores: Tensor, rows: Rows, unit: int, scale: float, sinks: int, window: int) -> Selection:
        """Cut float32 scores `[B, G, N]`; ties go to the lower position."""
        if sinks:
            scores[:, :, :sinks] = torch.inf
        if self.framed:
            units = rows.units(unit)
            keep_frame(scores, units, self.share.of_each(units), unit)
        width = self.size(rows.max_len, unit)
        local = min(max(self.local, window), width)
        ids = topk_and_last(scores, rows.seq_lens, width - local, local, unit=unit, share=self.share)
        return Selection(*ids, unit)


@cache
def _share(kept: float, minimum: int) -> Share:
    """A fraction that rounds every M * kept up as the decimal number does, small enough for 64 bits.

    It is the smallest fraction from `kept` up whose denominator is at most the greatest M: were an integer k between
    M * kept and M times that fraction, k / M would be a smaller one.
    """
    exact = Fraction(str(kept))
    near = exact.limit_denominator(_MOST_UNITS)
    if near < exact:
        # The next one up among those denominators: p/q with p·b - a·q = 1 and q as large as may be (Farey).
        smallest = -pow(near.numerator, -1, near.denominator) % near.denominator
        denominator = smallest + (_MOST_UNITS - smallest) // near.denominator * near.denominator
        near = Fraction((near.numerator * denominator + 1) // near.denominator, denominator)
    return Share(near.numerator, near.denominator, minimum)
