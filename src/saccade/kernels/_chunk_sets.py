"""From chunks in order of preference to the set that a budget holds."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._ranges import lay_out
from saccade.types import Selection


def fill_budget(
    numbers: Tensor,
    starts: Tensor,
    lengths: Tensor,
    seq_lens: Tensor,
    *,
    head: Tensor,
    tail: Tensor,
    budget: int,
    width: int,
) -> Selection:
    """The first `head` tokens, whole chunks until the next one does not fit, and everything from `tail` on.

    Args:
        numbers, starts, lengths: int64 `[B, G, C]`, chunks from the best down: which one, where it starts, how many
            tokens it has; 0 tokens: no chunk, behind all that are. Chunks of higher number lie behind those of lower.
        seq_lens, head, tail: int32 `[B]`.
        budget: tokens of a set; what lies before `head` and behind `tail` is in it all the same.
        width: how many tokens the ids have room for.

    Returns:
        Tokens int32 `[B, G, width]`, ascending, -1 behind the last, and their counts.
    """
    room = budget - head - (seq_lens - tail)
    fits = (lengths > 0) & (lengths.cumsum(-1) <= room[:, None, None])
    order = numbers.masked_fill(~fits, torch.iinfo(torch.int64).max).sort(dim=-1).indices
    lengths = (lengths * fits).gather(-1, order)
    shape = (*lengths.shape[:2], 1)
    before, last, behind = (value[:, None, None].expand(shape).long() for value in (head, tail, seq_lens - tail))
    first = torch.cat((torch.zeros_like(before), starts.gather(-1, order), last), dim=-1)
    size = torch.cat((before, lengths, behind), dim=-1)
    return Selection(lay_out(first, size, width).clamp(min=-1).int(), size.sum(-1).int())
