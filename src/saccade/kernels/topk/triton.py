"""Exact top-k on CUDA: the cut is found by counting, so that ties, infinities and clusters are like any other scores.

Short rows take one launch, in which one program per row searches the cut. Of long rows, three launches first leave out
what cannot be chosen: with a row dealt into at least k blocks, the k-th best of the blocks' maxima is reached by at
least k scores, so that no score below it belongs to the best k. Usually little more than k remain, which a program holds
in registers; when too many do for the buffer, as among equal scores, the row itself is searched. What is chosen never
depends on the way taken.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

DIRECT = 8192
"""Rows up to this width are searched without narrowing them first: three more launches cost more."""
HELD = 8192
"""The most keys that a program keeps in registers while it searches their cut."""
TILE = 4096
"""Entries that a program looks at together."""
PART = 1024
"""Entries of the parts of a row whose candidates are collected by a program each."""
PART_WARPS = 4
DEPTH = 16
WARPS = 16
FLOOR_WARPS = 16
FEWEST_BLOCKS = 4096
RUN = 256
"""Entries that a program sorts by comparing each with all."""
WAYS = 16
"""Sorted runs that become one in a launch."""
MERGED = 64
"""Entries that a program moves to their place among WAYS runs; divides RUN."""
LINE = 32
"""Counters of a cache line: those of two rows never share one, or their atomic additions would wait for each other."""

_LOWEST = tl.constexpr(-(2**31))  # below the key of every number
_HIGHEST = tl.constexpr(2**31 - 1)
_NOTHING = tl.constexpr(-(2**63))  # behind every entry of a ranking


def topk(
    scores: Tensor, lengths: Tensor, k: int, order: Literal["position", "score"], reserved: int
) -> tuple[Tensor, Tensor]:
    return _topk(scores, lengths, min(k, scores.shape[2]), 0, reserved, None, order == "score")


def topk_and_last(scores: Tensor, lengths: Tensor, k: int, last: int, sizes: Tensor | None) -> tuple[Tensor, Tensor]:
    return _topk(scores, lengths, min(k, scores.shape[2]), last, 0, sizes, False)


def _topk(
    scores: Tensor, lengths: Tensor, kept: int, last: int, reserved: int, bounds: Tensor | None, ranked: bool
) -> tuple[Tensor, Tensor]:
    """The best `kept` before the `last` entries of each row, fewer where a bound says so, and these last entries."""
    batch, groups, width = scores.shape
    if scores.stride(2) != 1:
        scores = scores.contiguous()
    rows = batch * groups
    ids = torch.empty((batch, groups, kept + last), dtype=torch.int32, device=scores.device)
    counts = torch.empty((batch, groups), dtype=torch.int32, device=scores.device)
    entries = torch.empty((rows, kept if ranked else 0), dtype=torch.int64, device=scores.device)
    row = (scores, scores.stride(0), scores.stride(1), groups)
    want = (lengths, kept, last, reserved, lengths if bounds is None else bounds)
    bounded = bounds is not None

    blocks = max(FEWEST_BLOCKS, triton.next_power_of_2(2 * kept))
    narrowed = kept > 0 and width > DIRECT and width >= 2 * blocks
    table = _narrow(row, want, rows, width, blocks, bounded) if narrowed else (lengths,) * 6
    splits = triton.cdiv(width, PART)
    held = _held(blocks if narrowed else triton.next_power_of_2(width))
    _select[(rows,)](
        *row, *want, *table, splits, 2 * blocks, entries, ids, counts,
        BOUNDED=bounded, VECTOR=_vector(width), NARROWED=narrowed, RANKED=ranked,
        SPLITS=triton.next_power_of_2(splits) if narrowed else 1, HELD=held, LINE=LINE, TILE=TILE, num_warps=WARPS,
    )  # fmt: skip
    if ranked:
        _rank(entries, ids)
    return ids, counts


def _held(number: int) -> int:
    """How many keys a program keeps in registers where there are about `number`, a power of two; 0: none."""
    return max(number, TILE) if number <= HELD else 0


def _vector(width: int) -> int:
    """How many neighbours may be read if one is wanted: 16 bytes where rows are whole numbers of them."""
    return 4 if width % 4 == 0 else 1


def _narrow(
    row: tuple[Tensor, int, int, int],
    want: tuple[Tensor, int, int, int, Tensor],
    rows: int,
    width: int,
    blocks: int,
    bounded: bool,
) -> tuple[Tensor, ...]:
    """Candidates among which what every row wants lies, and where each part of a row left its own."""
    device, splits, vector = row[0].device, triton.cdiv(width, PART), _vector(width)
    maxima = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    floors, sizes = torch.empty((2, rows, LINE), dtype=torch.int32, device=device)
    keys, positions = torch.empty((2, rows, 2 * blocks), dtype=torch.int32, device=device)
    starts, found, ends = torch.empty((3, rows, splits), dtype=torch.int32, device=device)
    _maxima[(rows, blocks // 256)](*row, *want, maxima, blocks, BOUNDED=bounded, VECTOR=vector, DEPTH=DEPTH, COLUMNS=256)
    _floors[(rows,)](
        row[3], *want, maxima, blocks, floors, sizes,
        BOUNDED=bounded, HELD=_held(blocks), LINE=LINE, TILE=TILE, num_warps=FLOOR_WARPS,
    )  # fmt: skip
    _collect[(rows, splits)](
        *row, *want, floors, sizes, keys, positions, 2 * blocks, starts, found, splits,
        BOUNDED=bounded, VECTOR=vector, LINE=LINE, TILE=PART, num_warps=PART_WARPS,
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
        _merge_runs[(rows, triton.cdiv(kept, MERGED))](
            source, target, ids, kept, run, LAST=run * WAYS >= kept, WAYS=WAYS, TILE=MERGED
        )
        run *= WAYS


@triton.jit
def _keys(scores: tl.tensor) -> tl.tensor:
    """Integers that compare as the floats do; -0.0 becomes 0.0."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(bits == _LOWEST, 0, bits)
    return tl.where(bits < 0, bits ^ _HIGHEST, bits)


@triton.jit
def _load(
    source: tl.tensor, offset: tl.tensor, stop: tl.tensor, FLOATS: tl.constexpr, VECTOR: tl.constexpr
) -> tl.tensor:
    """Keys, _LOWEST from `stop` on. VECTOR neighbours are read or left out together, which one load can do."""
    inside = offset // VECTOR * VECTOR < stop
    if FLOATS:
        return tl.where(offset < stop, _keys(tl.load(source + offset, mask=inside, other=0.0)), _LOWEST)
    else:
        return tl.where(offset < stop, tl.load(source + offset, mask=inside, other=_LOWEST), _LOWEST)


@triton.jit
def _wanted(
    groups: tl.tensor,
    lengths: tl.tensor,
    kept: tl.tensor,
    last: tl.tensor,
    reserved: tl.tensor,
    bounds: tl.tensor,
    BOUNDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """How many of a row are to be chosen, among how many (0 when none is wanted), and how many follow them."""
    batch = tl.program_id(0) // groups
    length = tl.maximum(tl.load(lengths + batch) - reserved, 0)
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
def _inner(low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Three bounds between quarters of a range."""
    return low + ((high - low) >> 2), low + ((high - low) >> 1), low + (((high - low) * 3) >> 2)


@triton.jit
def _reach(keys: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """1 for each of three bounds that a key reaches, in 21 bits each."""
    first, second, third = _inner(low, high)
    counts = (keys >= first.to(tl.int32)).to(tl.int64)
    counts += (keys >= second.to(tl.int32)).to(tl.int64) << 21
    return counts + ((keys >= third.to(tl.int32)).to(tl.int64) << 42)


@triton.jit
def _quarter(
    packed: tl.tensor, count: tl.tensor, low: tl.tensor, high: tl.tensor, reaching: tl.tensor, above: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The quarter of the range in which the `count`-th best lies, what reaches it and what lies above it."""
    first, second, third = _inner(low, high)
    reach_first = packed & 0x1FFFFF
    reach_second = (packed >> 21) & 0x1FFFFF
    reach_third = packed >> 42
    in_third = reach_third >= count
    in_second = reach_second >= count
    in_first = reach_first >= count
    above = tl.where(in_third, above, tl.where(in_second, reach_third, tl.where(in_first, reach_second, reach_first)))
    high = tl.where(in_third, high, tl.where(in_second, third, tl.where(in_first, second, first)))
    reaching = tl.where(
        in_third, reach_third, tl.where(in_second, reach_second, tl.where(in_first, reach_first, reaching))
    )
    low = tl.where(in_third, third, tl.where(in_second, second, tl.where(in_first, first, low)))
    return low, high, reaching, above


@triton.jit
def _cut_held(
    keys: tl.tensor, size: tl.tensor, count: tl.tensor, enough: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """As `_cut`, of `size` keys in registers; the others are _LOWEST."""
    low = tl.min(tl.where(keys > _LOWEST, keys, _HIGHEST), 0).to(tl.int64)
    high = tl.max(keys, 0).to(tl.int64) + 1
    reaching = size.to(tl.int64)
    above = reaching * 0
    while (reaching > enough) & (high - low > 1):
        packed = tl.sum(_reach(keys, low, high), 0)
        low, high, reaching, above = _quarter(packed, count, low, high, reaching, above)
    return low.to(tl.int32), (high - 1).to(tl.int32), above.to(tl.int32)


@triton.jit
def _cut(
    source: tl.tensor, stop: tl.tensor, count: tl.tensor, enough: tl.tensor, FLOATS: tl.constexpr, VECTOR: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys `low <= last` and a number: at least `count` of the first `stop` reach `low`, `number` exceed `last`.

    The number is below `count`. Either `low` is `last`, or at most `enough` (at least `count`) reach `low`.
    """
    lane = tl.arange(0, TILE)
    smallest = tl.full([TILE], _HIGHEST, tl.int32)
    largest = tl.full([TILE], _LOWEST, tl.int32)
    for start in range(0, stop, TILE):
        keys = _load(source, start + lane, stop, FLOATS, VECTOR)
        largest = tl.maximum(largest, keys)
        smallest = tl.minimum(smallest, tl.where(start + lane < stop, keys, _HIGHEST))
    low = tl.min(smallest, 0).to(tl.int64)
    high = tl.max(largest, 0).to(tl.int64) + 1
    reaching = stop.to(tl.int64)
    above = reaching * 0
    while (reaching > enough) & (high - low > 1):
        counts = tl.zeros([TILE], tl.int64)
        for start in range(0, stop, TILE):
            counts += _reach(_load(source, start + lane, stop, FLOATS, VECTOR), low, high)
        packed = tl.sum(counts, 0)
        low, high, reaching, above = _quarter(packed, count, low, high, reaching, above)
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
    reserved: tl.tensor,
    bounds: tl.tensor,
    maxima: tl.tensor,
    blocks: tl.tensor,
    BOUNDED: tl.constexpr,
    VECTOR: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Block i holds the positions i, i + blocks, ...: neighbours, often high together, lie in different ones."""
    row, source = _row_of(scores, batch_stride, group_stride, groups)
    _, others, _ = _wanted(groups, lengths, kept, last, reserved, bounds, BOUNDED)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    best = tl.full([DEPTH, COLUMNS], _LOWEST, tl.int32)
    for start in range(0, tl.cdiv(others, blocks), DEPTH):
        offset = (start + tl.arange(0, DEPTH))[:, None] * blocks + column[None, :]
        best = tl.maximum(best, _load(source, offset, others, True, VECTOR))
    tl.store(maxima + row * blocks + column, tl.max(best, 0))


@triton.jit
def _floors(
    groups: tl.tensor,
    lengths: tl.tensor,
    kept: tl.tensor,
    last: tl.tensor,
    reserved: tl.tensor,
    bounds: tl.tensor,
    maxima: tl.tensor,
    blocks: tl.tensor,
    floors: tl.tensor,
    sizes: tl.tensor,
    BOUNDED: tl.constexpr,
    HELD: tl.constexpr,
    LINE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A key that enough of each row's maxima reach and few more, and an empty buffer."""
    row = tl.program_id(0).to(tl.int64)
    count, others, _ = _wanted(groups, lengths, kept, last, reserved, bounds, BOUNDED)
    stop = tl.minimum(others, blocks)
    if HELD:
        keys = _load(maxima + row * blocks, tl.arange(0, HELD), stop, False, 4)
        low, _, _ = _cut_held(keys, stop, count, count + count // 16)
    else:
        low, _, _ = _cut(maxima + row * blocks, stop, count, count + count // 16, False, 4, TILE)
    tl.store(floors + row * LINE, low)
    tl.store(sizes + row * LINE, 0)


@triton.jit
def _collect(
    scores: tl.tensor,
    batch_stride: tl.tensor,
    group_stride: tl.tensor,
    groups: tl.tensor,
    lengths: tl.tensor,
    kept: tl.tensor,
    last: tl.tensor,
    reserved: tl.tensor,
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
    VECTOR: tl.constexpr,
    LINE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Append what reaches the floor; parts of a row come in any order, and note where theirs are."""
    row, source = _row_of(scores, batch_stride, group_stride, groups)
    _, others, _ = _wanted(groups, lengths, kept, last, reserved, bounds, BOUNDED)
    split = tl.program_id(1)
    position = split * TILE + tl.arange(0, TILE)
    key = _load(source, position, others, True, VECTOR)
    taken = (position < others) & (key >= tl.load(floors + row * LINE))
    behind = tl.cumsum(taken.to(tl.int32), 0)
    number = tl.sum(taken.to(tl.int32), 0)
    start = tl.atomic_add(sizes + row * LINE, number, sem="relaxed")
    place = start + behind - 1
    fits = taken & (place < capacity)
    tl.store(keys + row * capacity + place, key, mask=fits)
    tl.store(positions + row * capacity + place, position, mask=fits)
    tl.store(starts + row * splits + split, start)
    tl.store(found + row * splits + split, number)


@triton.jit
def _entry(keys: tl.tensor, positions: tl.tensor) -> tl.tensor:
    """A key over its inverted position, so that larger is better; with _LOWEST for a key, an absent one."""
    return (keys.to(tl.int64) << 32) | (positions ^ _HIGHEST).to(tl.int64)


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
        tl.store(entries + place, _entry(keys, positions), mask=chosen)
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
    reserved: tl.tensor,
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
    VECTOR: tl.constexpr,
    NARROWED: tl.constexpr,
    RANKED: tl.constexpr,
    SPLITS: tl.constexpr,
    HELD: tl.constexpr,
    LINE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write a row's best by position, or as entries."""
    row, source = _row_of(scores, batch_stride, group_stride, groups)
    count, others, length = _wanted(groups, lengths, kept, last, reserved, bounds, BOUNDED)
    ending = tl.minimum(length, last)
    total = count + ending
    tl.store(counts + row, total)
    ids += row * (kept + last)
    entries += row * kept
    lane = tl.arange(0, TILE)
    size = others
    small = False
    if NARROWED:
        size = tl.load(sizes + row * LINE)
        small = size <= capacity
        keys += row * capacity
        positions += row * capacity
        ends += row * splits
        starts += row * splits
        split = tl.arange(0, SPLITS)
        numbers = tl.load(found + row * splits + split, mask=split < splits, other=0)
        tl.store(ends + split, tl.cumsum(numbers, 0), mask=split < splits)
        tl.debug_barrier()
    surer = count * 0
    tied = count * 0
    if size <= HELD:
        if HELD:
            nth = tl.arange(0, HELD)
            position = nth
            if NARROWED:
                key, position = _candidate(nth, size, keys, positions, starts, ends, splits, SPLITS)
            else:
                key = _load(source, nth, size, True, VECTOR)
            low, top, above = _cut_held(key, size, count, count)
            _write(key, position, low, top, count - above, surer, tied, kept, ids, entries, RANKED)
    elif small:
        low, top, above = _cut(keys, size, count, count, False, 4, TILE)
        for start in range(0, size, TILE):
            key, position = _candidate(start + lane, size, keys, positions, starts, ends, splits, SPLITS)
            surer, tied = _write(key, position, low, top, count - above, surer, tied, kept, ids, entries, RANKED)
    else:
        low, top, above = _cut(source, others, count, count, True, VECTOR, TILE)
        for start in range(0, others, TILE):
            key = _load(source, start + lane, others, True, VECTOR)
            surer, tied = _write(key, start + lane, low, top, count - above, surer, tied, kept, ids, entries, RANKED)
    for start in range(count, kept + last, TILE):
        slot = start + lane
        if RANKED:
            tl.store(entries + slot, _entry(tl.full([TILE], _LOWEST, tl.int32), slot), mask=slot < kept)
        else:
            tl.store(ids + slot, tl.where(slot < total, length - total + slot, -1), mask=slot < kept + last)


@triton.jit
def _candidate(
    nth: tl.tensor,
    size: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    splits: tl.tensor,
    SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The n-th candidates by position: each lies in the first part of the row that ends behind n."""
    part = nth * 0
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
    return key, tl.load(positions + place, mask=present, other=0)


@triton.jit
def _put(
    entry: tl.tensor, rank: tl.tensor, present: tl.tensor, entries: tl.tensor, ids: tl.tensor, LAST: tl.constexpr
) -> None:
    if LAST:
        position = (entry & _HIGHEST).to(tl.int32) ^ _HIGHEST
        tl.store(ids + rank, tl.where((entry >> 32) == _LOWEST, -1, position), mask=present)
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
    """An entry's rank is the number of larger entries: no two are equal."""
    offset = tl.program_id(0).to(tl.int64) * kept
    begin = tl.program_id(1) * RUN
    slot = begin + tl.arange(0, RUN)
    entry = tl.load(source + offset + slot, mask=slot < kept, other=_NOTHING)
    before = tl.zeros([RUN, OTHERS], tl.int32)
    for start in range(begin, tl.minimum(begin + RUN, kept), OTHERS):
        other_slot = start + tl.arange(0, OTHERS)
        other = tl.load(source + offset + other_slot, mask=other_slot < kept, other=_NOTHING)
        before += (other[None, :] > entry[:, None]).to(tl.int32)
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
    """Merge WAYS runs at a time: an entry moves behind the larger ones of each, which bisection counts."""
    offset = tl.program_id(0).to(tl.int64) * kept
    slot = tl.program_id(1) * TILE + tl.arange(0, TILE)
    entry = tl.load(source + offset + slot, mask=slot < kept, other=_NOTHING)
    first = tl.program_id(1) * TILE // (run * WAYS) * WAYS
    begin = tl.minimum((first + tl.arange(0, WAYS)) * run, kept)[:, None]
    low = begin + tl.zeros([WAYS, TILE], tl.int32)
    high = tl.minimum(low + run, kept)
    span = run
    while span > 0:
        middle = (low + high) // 2
        other = tl.load(source + offset + middle, mask=low < high, other=_NOTHING)
        ahead = other > entry[None, :]
        low, high = tl.where((low < high) & ahead, middle + 1, low), tl.where(ahead, high, middle)
        span = span // 2
    rank = tl.sum(low - begin, 0)
    _put(entry, first * run + rank, slot < kept, target + offset, ids + offset, LAST)
