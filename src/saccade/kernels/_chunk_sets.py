"""From chunks in order of preference to the set that a budget holds, and lists of neighbouring integers."""

from __future__ import annotations

import torch
from torch import Tensor

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
    fits = (lengths > 0) & (lengths.cumsum(-1) <= (budget - head - (seq_lens - tail))[:, None, None])
    order = numbers.masked_fill(~fits, torch.iinfo(torch.int64).max).sort(dim=-1).indices
    lengths = (lengths * fits).gather(-1, order)
    shape = (*lengths.shape[:2], 1)
    before, last, behind = (value[:, None, None].expand(shape).long() for value in (head, tail, seq_lens - tail))
    first = torch.cat((torch.zeros_like(before), starts.gather(-1, order), last), dim=-1)
    size = torch.cat((before, lengths, behind), dim=-1)
    return Selection(lay_out(first, size, width).clamp(min=-1).int(), size.sum(-1).int())


def lay_out(first: Tensor, sizes: Tensor, width: int) -> Tensor:
    """`first[i], first[i] + 1, ...` (`sizes[i]` of them) for every i in turn, int64 `[..., width]`.

    What does not fit is cut off; places behind the last are negative. `first` and `sizes` are int64 `[..., n]`.
    """
    bounds = torch.nn.functional.pad(sizes.cumsum(-1).clamp(max=width), (1, 0))
    # A place's number plus its list's shift is the integer there. The last list fills up with negative ones.
    shifts = torch.nn.functional.pad(first - bounds[..., :-1], (0, 1), value=-width)
    sizes = torch.nn.functional.pad(bounds, (0, 1), value=width).diff(dim=-1)
    outer = sizes.shape[:-1].numel()
    flat = torch.repeat_interleave(shifts.flatten(), sizes.flatten(), output_size=outer * width)
    return flat.view(*sizes.shape[:-1], width) + torch.arange(width, device=first.device)
