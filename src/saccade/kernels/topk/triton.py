"""Exact top-k on CUDA: the cut is found by counting, so that ties, infinities and clusters are like any other scores.

Short rows take one launch, in which one program per row searches the cut. Of long rows, four launches first leave out
what cannot be chosen: with a row dealt into at least k blocks, the k-th best of the blocks' maxima is reached by at
least k scores, so that no score below it belongs to the best k. Usually little more than k remain; when too many do for
the buffer, as among equal scores, the row itself is searched. What is chosen never depends on the way taken.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.errors import KernelError

DIRECT = 32768
"""Rows up to this width are searched without narrowing them first: four launches cost more."""
TILE = 4096
"""Entries that a program looks at together."""
FEWEST_BLOCKS = 4096
RUN = 256
"""Entries that a program sorts by comparing each with all."""
WAYS = 16
"""Sorted runs that become one in a launch."""
WIDEST = 2**21 - 1
"""Three counts of a row share 63 bits."""

_LOWEST = tl.constexpr(-(2**31))  # below the key of every number
_HIGHEST = tl.constexpr(2**31 - 1)
_NOTHING = tl.constexpr(-(2**63))  # behind every chosen entry in a ranking


def topk(scores: Tensor, lengths: Tensor, k: int, order: Literal["position", "score"]) -> tuple[Tensor, Tensor]:
    return _topk(scores, lengths, min(k, scores.shape[2]), 0, None, order == "score")


def topk_and_last(scores: Tensor, lengths: Tensor, k: int, last: int, sizes: Tensor | None) -> tuple[Tensor, Tensor]:
    return _topk(scores, lengths, min(k, scores.shape[2]), last, sizes, False)


def _topk(
    scores: Tensor, lengths: Tensor, kept: int, last: int, bounds: Tensor | None, ranked: bool
) -> tuple[Tensor, Tensor]:
    """The best `kept` before the `last` entries of each row, fewer where a bound says so, and these last entries."""
    batch, groups, width = scores.shape
    if width > WIDEST:
        raise KernelError(f"topk: implementation 'triton' takes rows of at most {WIDEST} scores, got {width}")
    if scores.stride(2) != 1:
        scores = scores.contiguous()
    rows = batch * groups
    ids = torch.empty((batch, groups, kept + last), dtype=torch.int32, device=scores.device)
    counts = torch.empty((batch, groups), dtype=torch.int32, device=scores.device)
    entries = torch.empty((rows, kept if ranked else 0), dtype=torch.int64, device=scores.device)
    row = (scores, scores.stride(0), scores.stride(1), groups)
    want = (lengths, kept, last, lengths if bounds is None else bounds)
    bounded = bounds is not None

    blocks = max(FEWEST_BLOCKS, triton.next_power_of_2(2 * kept))
    narrowed = kept > 0 and width > DIRECT and width >= 4 * blocks
    table = _narrow(row, want, rows, width, blocks, bounded) if narrowed else (lengths,) * 6
    splits = triton.cdiv(width, TILE)
    _select[(rows,)](
        *row, *want, *table, splits, 2 * blocks, entries, ids, counts,
        BOUNDED=bounded, NARROWED=narrowed, RANKED=ranked, SPLITS=triton.next_power_of_2(splits) if narrowed else 1,
        TILE=TILE, num_warps=16,
    )  # fmt: skip
    if ranked:
        _rank(entries, ids)
    return ids, counts


def _narrow(
    row: tuple[Tensor, int, int, int],
    want: tuple[Tensor, int, int, Tensor],
    rows: int,
    width: int,
    blocks: int,
    bounded: bool,
) -> tuple[Tensor, ...]:
    """Candidates among which what every row wants lies, and where each part of a row left its own."""
    device, splits = row[0].device, triton.cdiv(width, TILE)
    maxima = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    floors, sizes = torch.empty((2, rows), dtype=torch.int32, device=device)
    keys, positions = torch.empty((2, rows, 2 * blocks), dtype=torch.int32, device=device)
    starts, found, ends = torch.empty((3, rows, splits), dtype=torch.int32, device=device)
    _maxima[(rows, blocks // 256)](*row, *want, maxima, blocks, BOUNDED=bounded, DEPTH=16, COLUMNS=256)
    _floors[(rows,)](row[3], *want, maxima, blocks, floors, sizes, BOUNDED=bounded, TILE=TILE, num_warps=16)
    _collect[(rows, splits)](
        *row, *want, floors, sizes, keys, positions, 2 * blocks, starts, found, splits,
        BOUNDED=bounded, TILE=TILE, num_warps=8,
    )  # fmt: skip
    return sizes, keys, positions, starts, found, ends


def _rank(entries: Tensor, ids: Tensor) -> None:
    """Write the positions of `entries` `[rows, kept]` to `ids`, from the highest entry down."""
    rows, kept = entries.shape
    source, target = entries, torch.empty_like(entries)
    _sort_runs[(rows, triton.cdiv(kept, RUN))](
        source, target, ids, kept, LAST=kept <= RUN, RUN=RUN, OTHERS=16, num_warps=8
    )
    run = RUN
    while run < kept:
        source, target = target, source
        _merge_runs[(rows, triton.cdiv(kept, RUN))](
            source, target, ids, kept, run, LAST=run * WAYS >= kept, WAYS=WAYS, TILE=RUN
        )
        run *= WAYS


@triton.jit
def _keys(scores: tl.tensor) -> tl.tensor:
    """Integers that compare as the floats do; -0.0 becomes 0.0."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(bits == _LOWEST, 0, bits)
    return tl.where(bits < 0, bits ^ _HIGHEST, bits)


@triton.jit
def _load(source: tl.tensor, offset: tl.tensor, stop: tl.tensor, FLOATS: tl.constexpr) -> tl.tensor:
    present = offset < stop
    if FLOATS:
        return tl.where(present, _keys(tl.load(source + offset, mask=present, other=0.0)), _LOWEST)
    else:
        return tl.load(source + offset, mask=present, other=_LOWEST)


@triton.jit
def _wanted(
    groups: tl.tensor,
    lengths: tl.tensor,
    kept: tl.tensor,
    last: tl.tensor,
    bounds: tl.tensor,
    BOUNDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """How many of a row are to be chosen, among how many (0 when none is wanted), and how many follow them."""
    batch = tl.program_id(0) // groups
    length = tl.load(lengths + batch)
    ending = tl.minimum(length, last)
    others = length - ending
    count = tl.minimum(others, kept)
    if BOUNDED:
        count = tl.minimum(count, tl.maximum(tl.load(bounds + batch) - ending, 0))
    return count, tl.where(count > 0, others, 0), length


@triton.jit
def _row_of(
    scores: tl.tensor, batch_stride: tl.tensor, group_stride: tl.tensor, groups: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    row = tl.program_id(0).to(tl.int64)
    batch = row // groups
    return row, scores + batch * batch_stride + (row - batch * groups) * group_stride


@triton.jit
def _cut(
    source: tl.tensor, stop: tl.tensor, count: tl.tensor, enough: tl.tensor, FLOATS: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys `low <= last` and a number: at least `count` of the first `stop` reach `low`, `number` exceed `last`.

    The number is below `count`. Either `low` is `last`, or at most `enough` (at least `count`) reach `low`.
    """
    lane = tl.arange(0, TILE)
    smallest = tl.full([TILE], _HIGHEST, tl.int32)
    largest = tl.full([TILE], _LOWEST, tl.int32)
    for start in range(0, stop, TILE):
        keys = _load(source, start + lane, stop, FLOATS)
        largest = tl.maximum(largest, keys)
        smallest = tl.minimum(smallest, tl.where(start + lane < stop, keys, _HIGHEST))
    low = tl.min(smallest, 0).to(tl.int64)
    high = tl.max(largest, 0).to(tl.int64) + 1
    reaching = stop.to(tl.int64)
    above = reaching * 0
    while (reaching > enough) & (high - low > 1):
        # A quarter of the range is left each time: one pass counts what reaches its three inner bounds.
        first = low + ((high - low) >> 2)
        second = low + ((high - low) >> 1)
        third = low + (((high - low) * 3) >> 2)
        counts = tl.zeros([TILE], tl.int64)
        for start in range(0, stop, TILE):
            keys = _load(source, start + lane, stop, FLOATS)
            counts += (keys >= first.to(tl.int32)).to(tl.int64)
            counts += (keys >= second.to(tl.int32)).to(tl.int64) << 21
            counts += (keys >= third.to(tl.int32)).to(tl.int64) << 42
        packed = tl.sum(counts, 0)
        reach_first = packed & 0x1FFFFF
        reach_second = (packed >> 21) & 0x1FFFFF
        reach_third = packed >> 42
        in_third = reach_third >= count
        in_second = reach_second >= count
        in_first = reach_first >= count
        above = tl.where(
            in_third, above, tl.where(in_second, reach_third, tl.where(in_first, reach_second, reach_first))
        )
        high = tl.where(in_third, high, tl.where(in_second, third, tl.where(in_first, second, first)))
        reaching = tl.where(
            in_third, reach_third, tl.where(in_second, reach_second, tl.where(in_first, reach_first, reaching))
        )
        low = tl.where(in_third, third, tl.where(in_second, second, tl.where(in_first, first, low)))
    return low.to(tl.int32), (high - 1).to(tl.int32), above.to(tl.int32)


@triton.jit
def _maxima(
    scores: tl.tensor,
    batch_stride: tl.tensor,
    group_stride: tl.tensor,
    groups: tl.tensor,
    lengths: tl.tensor,
    kept: tl.tensor,
    last: tl.tensor,
    bounds: tl.tensor,
    maxima: tl.tensor,
    blocks: tl.tensor,
    BOUNDED: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Block i holds the positions i, i + blocks, ...: neighbours, often high together, lie in different ones."""
    row, source = _row_of(scores, batch_stride, group_stride, groups)
    _, others, _ = _wanted(groups, lengths, kept, last, bounds, BOUNDED)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    best = tl.full([DEPTH, COLUMNS], _LOWEST, tl.int32)
    for start in range(0, tl.cdiv(others, blocks), DEPTH):
        offset = (start + tl.arange(0, DEPTH))[:, None] * blocks + column[None, :]
        best = tl.maximum(best, _load(source, offset, others, True))
    tl.store(maxima + row * blocks + column, tl.max(best, 0))


@triton.jit
def _floors(
    groups: tl.tensor,
    lengths: tl.tensor,
    kept: tl.tensor,
    last: tl.tensor,
    bounds: tl.tensor,
    maxima: tl.tensor,
    blocks: tl.tensor,
    floors: tl.tensor,
    sizes: tl.tensor,
    BOUNDED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A key that enough of each row's maxima reach and few more, and an empty buffer."""
    row = tl.program_id(0).to(tl.int64)
    count, others, _ = _wanted(groups, lengths, kept, last, bounds, BOUNDED)
    low, _, _ = _cut(maxima + row * blocks, tl.minimum(others, blocks), count, count + count // 16, False, TILE)
    tl.store(floors + row, low)
    tl.store(sizes + row, 0)


@triton.jit
def _collect(
    scores: tl.tensor,
    batch_stride: tl.tensor,
    group_stride: tl.tensor,
    groups: tl.tensor,
    lengths: tl.tensor,
    kept: tl.tensor,
    last: tl.tensor,
    bounds: tl.tensor,
    floors: tl.tensor,
    sizes: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    capacity: tl.tensor,
    starts: tl.tensor,
    found: tl.tensor,
    splits: tl.tensor,
    BOUNDED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Append what reaches the floor; parts of a row come in any order, and note where theirs are."""
    row, source = _row_of(scores, batch_stride, group_stride, groups)
    _, others, _ = _wanted(groups, lengths, kept, last, bounds, BOUNDED)
    split = tl.program_id(1)
    position = split * TILE + tl.arange(0, TILE)
    key = _load(source, position, others, True)
    taken = (position < others) & (key >= tl.load(floors + row))
    behind = tl.cumsum(taken.to(tl.int32), 0)
    number = tl.sum(taken.to(tl.int32), 0)
    start = tl.atomic_add(sizes + row, number)
    place = start + behind - 1
    fits = taken & (place < capacity)
    tl.store(keys + row * capacity + place, key, mask=fits)
    tl.store(positions + row * capacity + place, position, mask=fits)
    tl.store(starts + row * splits + split, start)
    tl.store(found + row * splits + split, number)


@triton.jit
def _write(
    keys: tl.tensor,
    positions: tl.tensor,
    low: tl.tensor,
    last: tl.tensor,
    needed: tl.tensor,
    surer: tl.tensor,
    tied: tl.tensor,
    kept: tl.tensor,
    ids: tl.tensor,
    entries: tl.tensor,
    RANKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Write what is chosen of a row's next keys: all above `last`, and the first `needed` from `low` to `last`.

    `surer` and `tied` count both kinds among the keys before.
    """
    sure = keys > last
    level = (keys >= low) & (keys <= last)
    packed = sure.to(tl.int32) + (level.to(tl.int32) << 16)
    within = tl.cumsum(packed, 0)
    ties = tied + (within >> 16)
    place = surer + (within & 0xFFFF) + tl.minimum(ties, needed) - 1
    chosen = (sure | (level & (ties <= needed))) & (place < kept)
    if RANKED:
        entry = (keys.to(tl.int64) << 32) | (positions ^ _HIGHEST).to(tl.int64)
        tl.store(entries + place, entry, mask=chosen)
    else:
        tl.store(ids + place, positions, mask=chosen)
    total = tl.sum(packed, 0)
    return surer + (total & 0xFFFF), tied + (total >> 16)


@triton.jit
def _select(
    scores: tl.tensor,
    batch_stride: tl.tensor,
    group_stride: tl.tensor,
    groups: tl.tensor,
    lengths: tl.tensor,
    kept: tl.tensor,
    last: tl.tensor,
    bounds: tl.tensor,
    sizes: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    found: tl.tensor,
    ends: tl.tensor,
    splits: tl.tensor,
    capacity: tl.tensor,
    entries: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    BOUNDED: tl.constexpr,
    NARROWED: tl.constexpr,
    RANKED: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write a row's best by position, or as entries: a key over its inverted position, so that larger are better."""
    row, source = _row_of(scores, batch_stride, group_stride, groups)
    count, others, length = _wanted(groups, lengths, kept, last, bounds, BOUNDED)
    ending = tl.minimum(length, last)
    total = count + ending
    tl.store(counts + row, total)
    ids += row * (kept + last)
    entries += row * kept
    lane = tl.arange(0, TILE)
    size = others
    small = False
    if NARROWED:
        size = tl.load(sizes + row)
        small = size <= capacity
    surer = count * 0
    tied = count * 0
    if small:
        keys += row * capacity
        positions += row * capacity
        ends += row * splits
        starts += row * splits
        split = tl.arange(0, SPLITS)
        numbers = tl.load(found + row * splits + split, mask=split < splits, other=0)
        tl.store(ends + split, tl.cumsum(numbers, 0), mask=split < splits)
        tl.debug_barrier()
        low, top, above = _cut(keys, size, count, count, False, TILE)
        for start in range(0, size, TILE):
            # The i-th candidate by position lies in the first part of the row that ends behind i.
            nth = start + lane
            part = tl.zeros([TILE], tl.int32)
            step = SPLITS // 2
            while step > 0:
                middle = part + step
                end = tl.load(ends + middle - 1, mask=middle <= splits, other=_HIGHEST)
                part = tl.where(end <= nth, middle, part)
                step = step // 2
            present = nth < size
            before = tl.load(ends + part - 1, mask=present & (part > 0), other=0)
            place = tl.load(starts + part, mask=present, other=0) + nth - before
            key = tl.load(keys + place, mask=present, other=_LOWEST)
            position = tl.load(positions + place, mask=present, other=0)
            surer, tied = _write(key, position, low, top, count - above, surer, tied, kept, ids, entries, RANKED)
    else:
        low, top, above = _cut(source, others, count, count, True, TILE)
        for start in range(0, others, TILE):
            key = _load(source, start + lane, others, True)
            surer, tied = _write(key, start + lane, low, top, count - above, surer, tied, kept, ids, entries, RANKED)
    for start in range(count, kept + last, TILE):
        slot = start + lane
        if RANKED:
            tl.store(entries + slot, tl.full([TILE], _NOTHING, tl.int64), mask=slot < kept)
        else:
            tl.store(ids + slot, tl.where(slot < total, length - total + slot, -1), mask=slot < kept + last)


@triton.jit
def _put(
    entry: tl.tensor, rank: tl.tensor, present: tl.tensor, entries: tl.tensor, ids: tl.tensor, LAST: tl.constexpr
) -> None:
    if LAST:
        position = (entry & _HIGHEST).to(tl.int32) ^ _HIGHEST
        tl.store(ids + rank, tl.where(entry == _NOTHING, -1, position), mask=present)
    else:
        tl.store(entries + rank, entry, mask=present)


@triton.jit
def _sort_runs(
    source: tl.tensor,
    target: tl.tensor,
    ids: tl.tensor,
    kept: tl.tensor,
    LAST: tl.constexpr,
    RUN: tl.constexpr,
    OTHERS: tl.constexpr,
) -> None:
    """An entry's rank is the number of entries before it; absent ones, which are equal, keep their order."""
    offset = tl.program_id(0).to(tl.int64) * kept
    begin = tl.program_id(1) * RUN
    slot = begin + tl.arange(0, RUN)
    entry = tl.load(source + offset + slot, mask=slot < kept, other=_NOTHING)
    before = tl.zeros([RUN, OTHERS], tl.int32)
    for start in range(begin, tl.minimum(begin + RUN, kept), OTHERS):
        other_slot = start + tl.arange(0, OTHERS)
        other = tl.load(source + offset + other_slot, mask=other_slot < kept, other=_NOTHING)[None, :]
        equal = (other == entry[:, None]) & (other_slot[None, :] < slot[:, None])
        before += ((other > entry[:, None]) | equal).to(tl.int32)
    _put(entry, begin + tl.sum(before, 1), slot < kept, target + offset, ids + offset, LAST)


@triton.jit
def _merge_runs(
    source: tl.tensor,
    target: tl.tensor,
    ids: tl.tensor,
    kept: tl.tensor,
    run: tl.tensor,
    LAST: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Merge WAYS runs at a time: an entry moves behind those of the other runs that come before it."""
    offset = tl.program_id(0).to(tl.int64) * kept
    slot = tl.program_id(1) * TILE + tl.arange(0, TILE)
    entry = tl.load(source + offset + slot, mask=slot < kept, other=_NOTHING)
    first = tl.program_id(1) * TILE // (run * WAYS) * WAYS
    own = tl.program_id(1) * TILE // run
    rank = slot - own * run
    for other_run in range(first, tl.minimum(first + WAYS, tl.cdiv(kept, run))):
        begin = other_run * run
        low = tl.zeros([TILE], tl.int32) + begin
        high = tl.minimum(low + run, kept)
        span = tl.where(other_run == own, 0, run)
        while span > 0:
            middle = (low + high) // 2
            other = tl.load(source + offset + middle, mask=low < high, other=_NOTHING)
            # Only absent entries are equal: those of earlier runs go first.
            before = (other > entry) | ((other == entry) & (other_run < own))
            low, high = tl.where((low < high) & before, middle + 1, low), tl.where(before, high, middle)
            span = span // 2
        rank += low - begin
    _put(entry, first * run + rank, slot < kept, target + offset, ids + offset, LAST)
