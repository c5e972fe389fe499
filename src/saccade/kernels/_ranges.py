"""Lists of neighbouring integers laid out one after the other in a fixed width."""

from __future__ import annotations

import torch
from torch import Tensor


def lay_out(first: Tensor, sizes: Tensor, width: int) -> Tensor:
    """`first[i], first[i] + 1, ...` (`sizes[i]` of them) for every i in turn, int64 `[..., width]`.

    What does not fit is cut off; places behind the last are negative. `first` and `sizes` are int64 `[..., n]`.
    """
    stops = sizes.cumsum(-1).clamp(max=width)
    bounds = torch.nn.functional.pad(stops, (1, 0))
    # A place's number plus its list's shift is the integer there. The last list fills up with negative ones.
    shifts = torch.nn.functional.pad(first - bounds[..., :-1], (0, 1), value=-width)
    sizes = torch.nn.functional.pad(bounds, (0, 1), value=width).diff(dim=-1)
    outer = sizes.shape[:-1].numel()
    flat = torch.repeat_interleave(shifts.flatten(), sizes.flatten(), output_size=outer * width)
    return flat.view(*sizes.shape[:-1], width) + torch.arange(width, device=first.device)
