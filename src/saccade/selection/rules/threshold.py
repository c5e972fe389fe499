"""Every token above a given probability (LycheeDecode, section 4.4.1)."""

from dataclasses import dataclass

from torch import Tensor

from ._ranked import RankedRule, softmax_parts


@dataclass(frozen=True, slots=True)
class Threshold(RankedRule):
    """The current token and every other one whose softmax probability exceeds `tau`; at most `buffer` tokens."""

    tau: float
    buffer: int
    name = "threshold"

    def taken(
        self, scores: Tensor, others: Tensor, ranked: Tensor, scale: float, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weights, total = softmax_parts(scores, scale)
        above = weights > self.tau * total[..., None]
        if kept is not None:
            above |= kept
        current = others[:, None, None].expand(-1, scores.shape[1], 1).long()
        # What is kept comes first and the weights of the rest fall with the rank: those wanted are the first.
        wanted = above.sum(dim=-1) - above.gather(-1, current)[..., 0].long()
        width = ranked.shape[-1]
        return wanted.clamp(max=width).int(), wanted > width
