"""As many tokens as hold a given attention mass (LycheeDecode, section 4.4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.topk.sets import best_and_last
from ...types import Rows, Selection
from ..selector import Rule
from ._ranked import need_tokens, ranking, softmax_parts


@dataclass(frozen=True, slots=True)
class TopP(Rule):
    """The current token and the fewest best others whose softmax mass together reaches `p`; at most `buffer` tokens.

    A set that would need more keeps the best that fit and is marked as overflowed. p = 1 takes every token.
    """

    p: float
    buffer: int
    fixed_size = False

    def covers(self, length: int, unit: int) -> bool:
        return self.p == 1 and length <= self.buffer

    def size(self, length: int, unit: int) -> int:
        return min(length, self.buffer)

    def choose(self, scores: Tensor, rows: Rows, unit: int, scale: float) -> Selection:
        """Cut float32 token scores `[B, G, N]` by softmax(scale * scores); ties go to the lower position.

        Raises:
            PolicyError: for pages, which have no probability.
        """
        need_tokens("top_p", unit)
        others = rows.seq_lens - 1
        width = min(self.buffer, rows.max_len) - 1
        ranked = ranking(scores, others, width)
        present = ranked >= 0
        if self.p == 1:
            wanted = present
            overflowed = (others > width)[:, None].expand(-1, scores.shape[1])
        else:
            weights, total = softmax_parts(scores, scale)
            current = others[:, None, None].expand(-1, scores.shape[1], 1).long()
            own = weights.gather(-1, current).to(total.dtype)
            best = weights.gather(-1, ranked.clamp(min=0).long()).masked_fill(~present, 0)
            mass = own + best.cumsum(dim=-1, dtype=total.dtype)
            goal = self.p * total[..., None]
            # A token is wanted if what comes before it does not reach the goal.
            before = mass.roll(1, dims=-1)
            before[..., :1] = own
            wanted = present & (before < goal)
            reached = mass[..., -1:] if width else own
            overflowed = (others > width)[:, None] & (reached < goal)[..., 0]
        take = wanted.sum(dim=-1).int()
        ones = others.new_ones(others.shape)
        return Selection(*best_and_last(ranked, take, others, ones, 1), unit, overflowed)
