"""As many tokens as hold a given attention mass (LycheeDecode, section 4.4.1)."""

from dataclasses import dataclass

from torch import Tensor

from ._ranked import RankedRule, softmax_parts


@dataclass(frozen=True, slots=True)
class TopP(RankedRule):
    """The current token and the fewest best others whose softmax mass together reaches `p`; at most `buffer` tokens.

    p = 1 takes every token.
    """

    p: float
    buffer: int
    name = "top_p"

    def covers(self, length: int, unit: int) -> bool:
        return self.p == 1 and length <= self.buffer

    def taken(
        self, scores: Tensor, others: Tensor, ranked: Tensor, scale: float, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        present, width = ranked >= 0, ranked.shape[-1]
        beyond = (others > width)[:, None].expand(-1, scores.shape[1])
        if self.p == 1:
            return present.sum(dim=-1).int(), beyond
        weights, total = softmax_parts(scores, scale)
        own = weights.gather(-1, others[:, None, None].expand(-1, scores.shape[1], 1).long()).to(total.dtype)
        best = weights.gather(-1, ranked.clamp(min=0).long()).masked_fill(~present, 0)
        mass = own + best.cumsum(dim=-1, dtype=total.dtype)
        goal = self.p * total[..., None]
        # A token is wanted if what comes before it does not reach the goal.
        before = mass.roll(1, dims=-1)
        before[..., :1] = own
        wanted = before < goal
        if kept is not None:
            wanted |= kept.expand_as(scores).gather(-1, ranked.clamp(min=0).long())
        wanted &= present
        return wanted.sum(dim=-1).int(), beyond & ((mass[..., -1:] if width else own) < goal)[..., 0]
