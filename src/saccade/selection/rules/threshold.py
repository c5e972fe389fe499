"""Every token above a given probability (LycheeDecode, section 4.4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.topk.sets import best_and_last
from ...types import Rows, Selection
from ..selector import Rule
from ._ranked import need_tokens, ranking, softmax_parts


@dataclass(frozen=True, slots=True)
class Threshold(Rule):
    """The current token and every other one whose softmax probability exceeds `tau`; at most `buffer` tokens.

    A set that would need more keeps the best that fit and is marked as overflowed.
    """

    tau: float
    buffer: int
    fixed_size = False

    def size(self, length: int, unit: int) -> int:
        return min(length, self.buffer)

    def choose(self, scores: Tensor, rows: Rows, unit: int, scale: float) -> Selection:
        """Cut float32 token scores `[B, G, N]` by softmax(scale * scores); ties go to the lower position.

        Raises:
            PolicyError: for pages, which have no probability.
        """
        need_tokens("threshold", unit)
        others = rows.seq_lens - 1
        width = min(self.buffer, rows.max_len) - 1
        weights, total = softmax_parts(scores, scale)
        above = weights > self.tau * total[..., None]
        current = others[:, None, None].expand(-1, scores.shape[1], 1).long()
        # The weights fall with the rank, so those above the threshold are the first of the ranking.
        wanted = above.sum(dim=-1) - above.gather(-1, current)[..., 0].long()
        take = wanted.clamp(max=width).int()
        ones = others.new_ones(others.shape)
        ranked = ranking(scores, others, width)
        return Selection(*best_and_last(ranked, take, others, ones, 1), unit, wanted > width)
