"""The best of every row on CUDA: a program holds a row in registers and finds its cut by counting."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._triton.cut import cut_held, load_keys

NARROWEST = 1024
"""Fewer keys than that are compiled for no width of their own."""


def best_of_each(scores: Tensor, counts: Tensor) -> Tensor:
    """As the operation's `api`, rows of at most 16,384."""
    scores = scores.contiguous()
    chosen = torch.empty_like(scores, dtype=torch.bool)
    heads, rows, width = scores.shape
    held = max(triton.next_power_of_2(width), NARROWEST)
    _mark[(heads * rows,)](scores, counts, chosen, rows, width, HELD=held, num_warps=min(max(held // 512, 4), 16))
    return chosen


@triton.jit(do_not_specialize=["rows", "width"])
def _mark(
    scores: tl.tensor, counts: tl.tensor, chosen: tl.tensor, rows: tl.tensor, width: tl.tensor, HELD: tl.constexpr
) -> None:
    row = tl.program_id(0)
    count = tl.load(counts + row % rows)
    start = row.to(tl.int64) * width
    position = tl.arange(0, HELD)
    low, top, above = cut_held(load_keys(scores + start, position, width, True, 1), width, count, count, HELD)
    keys = load_keys(scores + start, position, width, True, 1)
    level = (keys >= low) & (keys <= top)
    first = tl.cumsum(level.to(tl.int32), 0) <= count - above
    tl.store(chosen + start + position, (keys > top) | (level & first), mask=position < width)
