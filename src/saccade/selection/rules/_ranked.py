"""What rules share that keep a varying number of the best tokens: the ranking, the softmax and the buffer."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import PolicyError
from ...kernels.topk.api import best_and_last, topk
from ...types import Rows, Selection, sum_dtype
from .framed import FrameableRule


class RankedRule(FrameableRule):
    """The current token and as many of the best others as a rule takes; at most `buffer` tokens.

    A set that would need more keeps the best that fit and is marked as overflowed.
    """

    __slots__ = ()
    name: ClassVar[str]
    buffer: int
    fixed_size = False
    keeps_last = True

    @abstractmethod
    def taken(
        self, scores: Tensor, others: Tensor, ranked: Tensor, scale: float, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """How many of each ranking are kept, int32 `[B, G]`, and where the rule wants more, bool `[B, G]`.

        Args:
            scores: float32 `[B, G, N]`, of tokens.
            others: int32 `[B]`, how many come before the current token.
            ranked: int32 `[B, G, R]`, these from the best down, ties to the lower position, what is `kept` in front; -1
                where a row has fewer.
            scale: the scores' factor inside the softmax.
            kept: bool `[B, 1, N]`, what is in the set whatever its score; None: nothing but the current token.
        """

    def size(self, length: int, unit: int) -> int:
        return min(length, self.buffer)

    def cut(self, scores: Tensor, rows: Rows, unit: int, scale: float, sinks: int, window: int) -> Selection:
        """Cut float32 token scores `[B, G, N]` by softmax(scale * scores); ties go to the lower position.

        Raises:
            PolicyError: for pages, which have no probability.
        """
        if unit != 1:
            raise PolicyError(
                f"rule {self.name} needs exact scores of single tokens: a page of {unit} tokens has no probability; "
                "use page=1"
            )
        places = torch.arange(scores.shape[-1], device=scores.device)
        present = places < rows.seq_lens[:, None]
        scores = scores.masked_fill(~present[:, None], -torch.inf)
        kept = None
        if sinks or window:
            kept = (((places < sinks) | (places >= rows.seq_lens[:, None] - window)) & present)[:, None]
        current = rows.seq_lens.clamp(max=1)  # none in a row that pads the batch
        others, width = rows.seq_lens - current, min(self.buffer, rows.max_len) - 1
        if width:
            best = scores if kept is None else scores.masked_fill(kept, torch.inf)
            ranked, _ = topk(best, others, width, order="score")
        else:
            ranked = scores.new_empty((*scores.shape[:2], 0), dtype=torch.int32)
        take, overflowed = self.taken(scores, others, ranked, scale, kept)
        take = torch.where(others[:, None] > 0, take, 0)
        return Selection(*best_and_last(ranked, take, others, current, 1), unit, overflowed)


def softmax_parts(scores: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax of `scale * scores` `[B, G, N]` as unnormalised float32 weights and their sum `[B, G]`, in float64."""
    weights = ((scores - scores.amax(dim=-1, keepdim=True)) * scale).exp()
    return weights, weights.sum(dim=-1, dtype=sum_dtype(scores.device))
