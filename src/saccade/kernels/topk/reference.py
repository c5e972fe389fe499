"""Exact top-k in plain torch: every entry gets a unique integer key, so that no tie is left to the sort."""

from typing import Literal

import torch
from torch import Tensor


def topk(scores: Tensor, lengths: Tensor, k: int, order: Literal["position", "score"]) -> tuple[Tensor, Tensor]:
    batch, groups, width = scores.shape
    positions = torch.arange(width, device=scores.device)
    # The score's rank in the high half, the inverted position in the low half: larger keys are better, none are equal.
    keys = ordered(scores) * 2**32 + (width - 1 - positions)
    keys = keys.masked_fill(positions >= lengths[:, None, None], torch.iinfo(torch.int64).min)
    chosen = torch.topk(keys, min(k, width), dim=-1).values
    counts = lengths.clamp(max=min(k, width))
    absent = torch.arange(chosen.shape[2], device=scores.device) >= counts[:, None, None]
    ids = (width - 1 - chosen % 2**32).masked_fill(absent, width)
    if order == "position":
        ids = ids.sort(dim=-1).values
    return ids.masked_fill(absent, -1).int(), counts[:, None].expand(batch, groups).contiguous()


def ordered(scores: Tensor) -> Tensor:
    """Integers that compare as the floats do; adding 0.0 makes -0.0 equal to 0.0."""
    bits = (scores + 0.0).view(torch.int32)
    # Larger bits of a negative number mean a smaller one: all but the sign are inverted.
    return (bits ^ ((bits >> 31) & (2**31 - 1))).long()
