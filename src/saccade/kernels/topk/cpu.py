"""Exact top-k on CPU: narrow the row to the blocks that can hold the answer, then let torch.topk choose."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

_SMALLEST_BLOCK = 3


def topk(scores: Tensor, lengths: Tensor, k: int, order: Literal["position", "score"]) -> tuple[Tensor, Tensor]:
    batch, groups, width = scores.shape
    kept = min(k, width)
    ids = torch.full((batch, groups, kept), -1, dtype=torch.int32, device="cpu")
    host = lengths.tolist()
    if host.count(host[0]) == batch:
        _choose(scores.flatten(0, 1)[:, : host[0]], kept, order, ids.flatten(0, 1))
    else:
        for row, length in enumerate(host):
            _choose(scores[row, :, :length], kept, order, ids[row])
    counts = lengths.clamp(max=kept)[:, None].expand(batch, groups).contiguous()
    return ids, counts


def _choose(rows: Tensor, kept: int, order: Literal["position", "score"], out: Tensor) -> None:
    """Write the best `kept` positions of `rows [R, n]` to the front of `out [R, kept]`."""
    count = min(kept, rows.shape[1])
    if count == 0:
        return
    best = _best(rows, count) if count < rows.shape[1] else torch.arange(count, device="cpu").expand(rows.shape[0], -1)
    if order == "score":
        # Positions are ascending, so a stable sort leaves equal scores in position order.
        ranks = rows.gather(1, best).sort(dim=1, descending=True, stable=True).indices
        best = best.gather(1, ranks)
    out[:, :count] = best


def _best(rows: Tensor, count: int) -> Tensor:
    """Positions `[R, count]`, ascending, of the best `count < n` entries of `rows [R, n]`."""
    candidates, floor = _candidates(rows, count)
    values = rows if candidates is None else rows.gather(1, candidates)
    top = torch.topk(values, count, dim=1, sorted=False)
    best = top.indices if candidates is None else candidates.gather(1, top.indices)
    best = best.sort(dim=1).values
    # torch.topk breaks ties at the cut as it likes: rows where equal scores may lie on both sides are decided again.
    cut = top.values.amin(dim=1, keepdim=True)
    unsure = (values >= cut).sum(dim=1, keepdim=True) != count
    if floor is not None:
        unsure |= cut == floor
    for row in [row for row, (tied,) in enumerate(unsure.tolist()) if tied]:
        above = (rows[row] > cut[row]).nonzero()[:, 0]
        level = (rows[row] == cut[row]).nonzero()[: count - above.shape[0], 0]
        best[row] = torch.cat((above, level)).sort().values
    return best


def _candidates(rows: Tensor, count: int) -> tuple[Tensor | None, Tensor | None]:
    """Positions among which all scores above a floor `[R, 1]` lie, the floor at most the cut; None when not worth it.

    Split the row into blocks and take the `count` blocks with the largest maxima. Their smallest maximum is the floor:
    `count` entries reach it, and every entry above it lies in a taken block. Entries that equal it may not.
    """
    groups, width = rows.shape
    # Choosing among the blocks, then inside the taken ones, costs least when both see equally many numbers.
    block = math.isqrt(width // count)
    if block < _SMALLEST_BLOCK:
        return None, None
    blocks = width // block
    # Block i holds positions i, i + blocks, i + 2·blocks, ...: a maximum over an outer dimension vectorises.
    maxima = rows[:, : blocks * block].view(groups, block, blocks).amax(dim=1)
    taken = torch.topk(maxima, count, dim=1, sorted=False)
    inside = torch.arange(0, blocks * block, blocks, device="cpu")[:, None] + taken.indices[:, None]
    rest = torch.arange(blocks * block, width, device="cpu").expand(groups, -1)
    return torch.cat((inside.flatten(1), rest), dim=1), taken.values.amin(dim=1, keepdim=True)
