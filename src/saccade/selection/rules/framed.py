"""A row's first and last tokens inside a rule's sets: sinks and a recent window, as in LycheeDecode's code."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ...types import Rows, Selection
from ..selector import Rule

SINKS, WINDOW = 128, 256
"""What LycheeDecode's published code keeps of every row (`get_sparse_attn_mask_from_topk`)."""
SINK_PART, WINDOW_PART = 8, 4
"""So many sinks are at most an eighth of a set and so long a window a quarter: at 1,024 tokens exactly theirs."""


class FrameableRule(Rule):
    """A rule that can keep a row's first and last units, whatever their scores, inside the size that it has."""

    __slots__ = ()

    @abstractmethod
    def cut(self, scores: Tensor, rows: Rows, unit: int, scale: float, sinks: int, window: int) -> Selection:
        """`choose`, with the first `sinks` units and the last `window` ones; may write into `scores`."""

    def choose(self, scores: Tensor, rows: Rows, unit: int, scale: float) -> Selection:
        return self.cut(scores, rows, unit, scale, 0, 0)


@dataclass(frozen=True, slots=True)
class Framed(Rule):
    """A `rule` whose sets hold a row's first `sinks` tokens and its last `window` ones, the current one among them.

    Both are inside the rule's size; of pages they count as many as hold so many tokens.
    """

    rule: FrameableRule
    sinks: int
    window: int

    @property
    def fixed_size(self) -> bool:
        return self.rule.fixed_size

    @property
    def keeps_last(self) -> bool:  # type: ignore[override]  # a rule's own is a constant
        return self.rule.keeps_last or self.window > 0

    def size(self, length: int, unit: int) -> int:
        return self.rule.size(length, unit)

    def frame(self, length: int, unit: int) -> tuple[int, int]:
        own = self.rule.frame(length, unit)[1]
        return units_of(self.sinks, unit) * unit, max(units_of(self.window, unit) * unit, own)

    def covers(self, length: int, unit: int) -> bool:
        return self.rule.covers(length, unit)

    def choose(self, scores: Tensor, rows: Rows, unit: int, scale: float) -> Selection:
        """The rule's set; scores of what is kept are overwritten."""
        sinks, window = units_of(self.sinks, unit), units_of(self.window, unit)
        return self.rule.cut(scores, rows, unit, scale, sinks, window)


def units_of(tokens: int, unit: int) -> int:
    """How many units hold so many tokens."""
    return -(-tokens // unit)


def frame_of(size: int, unit: int = 1) -> tuple[int, int]:
    """Sinks and window of a set of `size` tokens where nobody has named them, in tokens of whole units."""
    sinks, window = min(SINKS, size // SINK_PART), min(WINDOW, size // WINDOW_PART)
    return sinks // unit * unit, window // unit * unit


def keep_frame(scores: Tensor, units: Tensor, sizes: Tensor, unit: int = 1) -> None:
    """Raise above all others, in place, the scores `[B, G, N]` of what sets of such `sizes` `[B]` keep of every row.

    Rows have so many `units` `[B]` of `unit` tokens; it is `frame_of` on the device, for sets that grow with their row.
    """
    sinks, window = SINKS // unit, WINDOW // unit
    slot = torch.arange(sinks + window, device=scores.device)
    first = (slot < sinks) & (slot < sizes[:, None].div(SINK_PART, rounding_mode="floor"))
    behind = slot - sinks
    last = (behind >= 0) & (behind < sizes[:, None].div(WINDOW_PART, rounding_mode="floor"))
    # What is not kept points at the current unit, which is.
    current = (units[:, None] - 1).long()
    kept = torch.where(first, slot, torch.where(last, current - behind, current)).clamp(min=0)
    scores.scatter_(2, kept[:, None].expand(-1, scores.shape[1], -1), torch.inf)
