"""Sorting rows of distinct 64-bit entries: a score's key over its inverted position."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._triton.cut import HIGHEST

RUN = 256
"""Entries that a program sorts by comparing each with all."""
WAYS = 4
"""Sorted runs that become one in a launch; even, or two runs were not a part of what becomes one."""
MERGED = 128
"""Entries that a program moves to their place among WAYS runs at a time; divides RUN."""
PROGRAMS = 1024
"""Programs that sort or merge, about what a device runs at once: those that find nothing cost their launch."""

_NOTHING = tl.constexpr(-(2**63))  # behind every entry of a ranking


def rank(entries: Tensor, counts: Tensor, ids: Tensor) -> None:
    """Write the positions of the first `counts[row]` of `entries` `[rows, kept]` to `ids`, from the highest entry down.

    Behind them come -1; what the other entries are does not matter, and costs nothing.
    """
    rows, kept = entries.shape
    source, target = entries, torch.empty_like(entries)
    most = max(PROGRAMS // rows, 1)
    _sort_runs[(rows, min(triton.cdiv(kept, RUN), most))](
        source, target, counts, ids, kept, LAST=kept <= RUN, RUN=RUN, OTHERS=16, num_warps=8
    )
    run = RUN
    while run < kept:
        source, target = target, source
        _merge_runs[(rows, min(triton.cdiv(kept, MERGED), most))](
            source, target, counts, ids, kept, run, LAST=run * WAYS >= kept, WAYS=WAYS, TILE=MERGED
        )
        run *= WAYS


@triton.jit
def entry_of(keys: tl.tensor, positions: tl.tensor) -> tl.tensor:
    """A key over its inverted position, so that larger is better."""
    return (keys.to(tl.int64) << 32) | (positions ^ HIGHEST).to(tl.int64)


@triton.jit
def _put(
    entry: tl.tensor, rank: tl.tensor, present: tl.tensor, entries: tl.tensor, ids: tl.tensor, LAST: tl.constexpr
) -> None:
    if LAST:
        tl.store(ids + rank, (entry & HIGHEST).to(tl.int32) ^ HIGHEST, mask=present)
    else:
        tl.store(entries + rank, entry, mask=present)


@triton.jit
def _put_absent(slot: tl.tensor, count: tl.tensor, kept: tl.tensor, ids: tl.tensor, LAST: tl.constexpr) -> None:
    if LAST:
        tl.store(ids + slot, slot * 0 - 1, mask=(slot >= count) & (slot < kept))


@triton.jit
def _sort_runs(
    source: tl.tensor,
    target: tl.tensor,
    counts: tl.tensor,
    ids: tl.tensor,
    kept: tl.tensor,
    LAST: tl.constexpr,
    RUN: tl.constexpr,
    OTHERS: tl.constexpr,
) -> None:
    """An entry's rank is the number of larger entries: no two are equal."""
    offset = tl.program_id(0).to(tl.int64) * kept
    count = tl.load(counts + tl.program_id(0))
    for begin in range(tl.program_id(1) * RUN, kept if LAST else count, tl.num_programs(1) * RUN):
        slot = begin + tl.arange(0, RUN)
        _put_absent(slot, count, kept, ids + offset, LAST)
        if begin < count:
            entry = tl.load(source + offset + slot, mask=slot < count, other=_NOTHING)
            before = tl.zeros([RUN, OTHERS], tl.int32)
            for start in range(begin, tl.minimum(begin + RUN, count), OTHERS):
                other_slot = start + tl.arange(0, OTHERS)
                other = tl.load(source + offset + other_slot, mask=other_slot < count, other=_NOTHING)
                before += (other[None, :] > entry[:, None]).to(tl.int32)
            _put(entry, begin + tl.sum(before, 1), slot < count, target + offset, ids + offset, LAST)


@triton.jit
def _merge_runs(
    source: tl.tensor,
    target: tl.tensor,
    counts: tl.tensor,
    ids: tl.tensor,
    kept: tl.tensor,
    run: tl.tensor,
    LAST: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Merge WAYS runs at a time: an entry moves behind the larger ones of each, which bisection counts."""
    offset = tl.program_id(0).to(tl.int64) * kept
    count = tl.load(counts + tl.program_id(0))
    for begin in range(tl.program_id(1) * TILE, kept if LAST else count, tl.num_programs(1) * TILE):
        slot = begin + tl.arange(0, TILE)
        _put_absent(slot, count, kept, ids + offset, LAST)
        if begin < count:
            entry = tl.load(source + offset + slot, mask=slot < count, other=_NOTHING)
            first = begin // (run * WAYS) * WAYS
            start = tl.minimum((first + tl.arange(0, WAYS)) * run, count)[:, None]
            low = start + tl.zeros([WAYS, TILE], tl.int32)
            high = tl.minimum(low + run, count)
            span = run
            while span > 0:
                middle = (low + high) // 2
                other = tl.load(source + offset + middle, mask=low < high, other=_NOTHING)
                ahead = other > entry[None, :]
                low, high = tl.where((low < high) & ahead, middle + 1, low), tl.where(ahead, high, middle)
                span = span // 2
            rank = tl.sum(low - start, 0)
            _put(entry, first * run + rank, slot < count, target + offset, ids + offset, LAST)
