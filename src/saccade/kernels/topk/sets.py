"""Sets from rankings, in plain torch: the best of a row, and the entries that end it."""

from __future__ import annotations

import torch
from torch import Tensor

_LAST = torch.iinfo(torch.int32).max


def best_and_last(ranked: Tensor, take: Tensor, first: Tensor, last: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The sets of the first `take` `[B, G]` of each ranking `[B, G, R]` and of the units that end a row.

    Those are `first .. first + last` (int32 `[B]` each, `last` at most `width`), behind all that is ranked.

    Returns:
        ids int32 `[B, G, R + width]` ascending, -1 after the count; counts int32 `[B, G]`.
    """
    rank = torch.arange(ranked.shape[-1], dtype=torch.int32, device=ranked.device)
    taken = ranked.masked_fill(rank >= take[..., None], _LAST).sort(dim=-1).values
    return with_last(taken, take, first, last, width)


def with_last(ids: Tensor, counts: Tensor, first: Tensor, last: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """As `best_and_last`, of lists int32 `[B, G, R]` that ascend up to their count `[B, G]`."""
    slot = torch.arange(ids.shape[-1] + width, dtype=torch.int32, device=ids.device)
    behind = slot - counts[..., None]
    merged = torch.where(behind < 0, torch.nn.functional.pad(ids, (0, width)), first[:, None, None] + behind)
    total = counts + last[:, None]
    return torch.where(slot < total[..., None], merged, -1), total
