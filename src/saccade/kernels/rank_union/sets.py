"""A union between sinks and a window, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def framed(chosen: Tensor, counts: Tensor, lengths: Tensor, sinks: int, window: int) -> tuple[Tensor, Tensor]:
    """Sinks, then `chosen` `[B, 1, M]`, then the last `window` tokens, which never overlap however short the row.

    `chosen` counts from the first token behind the sinks. A row that fits is all there is, whatever was chosen.
    """
    lengths = lengths[:, None]
    fits = lengths <= sinks + chosen.shape[-1] + window
    counts = counts.masked_fill(fits, 0)
    sink_counts = torch.where(fits, lengths, lengths.clamp(max=sinks))
    window_counts = (lengths - sink_counts).clamp(max=window)
    total = sink_counts + counts + window_counts
    slot = torch.arange(sinks + chosen.shape[-1] + window, dtype=torch.int32, device=lengths.device)[None]
    middle = slot - sink_counts
    recent = lengths - total + slot
    picked = (
        chosen[:, 0].gather(-1, middle.clamp(0, max(chosen.shape[-1] - 1, 0)).long()) if chosen.shape[-1] else middle
    )
    ids = torch.where(slot < sink_counts, slot, torch.where(middle < counts, picked + sinks, recent))
    return torch.where(slot < total, ids, -1)[:, None], total
