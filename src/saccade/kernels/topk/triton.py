"""Exact top-k on CUDA: the cut is found by counting, so that ties, infinities and clusters are like any other scores.

Short rows take one launch, in which one program per row searches the cut. Of longer ones what cannot be chosen is left
out first: with a row dealt into at least k blocks, the k-th best of the blocks' maxima is reached by at least k scores,
so that no score below it belongs to the best k. Usually little more than k remain; when too many do, as among equal
scores, the row itself is searched. Where few are wanted, as of pages, the row's program does that too; else three
launches of many programs do it before. The way taken changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._share import Share
from saccade.kernels._triton.cut import HIGHEST, LOWEST, cut, cut_held, keys_of, load_keys
from saccade.kernels._triton.ranking import entry_of, rank

DIRECT = 8192
"""Rows up to this width are searched without narrowing them first: three more launches cost more."""
HELD = 8192
"""The most keys that a program keeps in registers while it searches their cut."""
HALVINGS = 3
"""So often a program may halve how many keys it holds, where a row has fewer."""
TILE = 256
"""Entries that a warp looks at together where they are not held."""
PART = 512
"""Entries of a row whose candidates one warp collects."""
FEWEST_BLOCKS = 4096
"""Fewer would be as slow to search; so many keys at least a program is made to hold."""
CROWD = 256
"""Of so many rows each takes fewer programs to look for maxima: those that have nothing to do cost their launch."""
COLLECTORS = 4096
"""Programs that collect candidates, about what a device runs at once: of more rows, each takes several parts."""
LINE = 32
"""Counters of a cache line: those of two rows never share one, or their atomic additions would wait for each other."""


@dataclass(frozen=True, slots=True)
class Alone:
    """Where a row's program does alone what else four launches do, and how.

    Attributes:
        most: entries that are wanted of a row, at most; 0: never.
        widest: scores of a row, at most: more are read faster by many programs.
        blocks: the fewest that a row is dealt into, and candidates there is room for.
        spread: blocks, at least, to an entry that is wanted, so that few of the best share one.
        deep: scores whose blocks' maxima are taken together, at most.
        read: scores among which candidates are found together.
        warps: Triton's.
    """

    most: int = 1024
    widest: int = 32_768
    blocks: int = 512
    spread: int = 2
    deep: int = 4096
    read: int = 2048
    warps: int = 8

    def blocks_of(self, kept: int, width: int) -> int:
        """Blocks of a row; 0 where its program is not alone, or holds all of the row anyway."""
        blocks: int = max(self.blocks, triton.next_power_of_2(self.spread * kept))
        return blocks if 0 < kept <= self.most and blocks < width <= self.widest else 0


ALONE = Alone()


def topk(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    last: int,
    reserved: int,
    unit: int,
    share: Share | None,
    ranked: bool,
    alone: Alone | None = None,
) -> tuple[Tensor, Tensor]:
    """The best `k` before the `last` entries of each row, fewer where a share says so, and these last entries."""
    batch, groups, width = scores.shape
    kept = min(k, width)
    if scores.stride(2) != 1:
        scores = scores.contiguous()
    rows = batch * groups
    ids = torch.empty((batch, groups, kept + last), dtype=torch.int32, device=scores.device)
    counts = torch.empty((batch, groups), dtype=torch.int32, device=scores.device)
    entries = torch.empty((rows, kept if ranked else 0), dtype=torch.int64, device=scores.device)
    row = (scores, scores.stride(0), scores.stride(1), groups)
    parts = (0, 0, 0) if share is None else (share.numerator, share.denominator, share.minimum)
    want, bounded = (lengths, kept, last, reserved, unit, *parts), share is not None

    alone = alone or ALONE
    if blocks := alone.blocks_of(kept, width):
        found = torch.empty((2, rows, blocks), dtype=torch.int32, device=scores.device)
        depth = min(triton.next_power_of_2(triton.cdiv(width, blocks)), alone.deep // blocks)
        _search[(rows,)](
            *row, *want, found, entries, ids, counts,
            BOUNDED=bounded, VECTOR=_vector(scores), RANKED=ranked, BLOCKS=blocks, HALVINGS=HALVINGS,
            DEPTH=depth, READ=alone.read, num_warps=alone.warps,
        )  # fmt: skip
    else:
        blocks = max(FEWEST_BLOCKS, triton.next_power_of_2(2 * kept))
        narrowed = kept > 0 and width > DIRECT and width >= 2 * blocks
        table = _narrow(row, want, rows, width, blocks, bounded) if narrowed else (lengths,) * 7
        splits = triton.cdiv(width, PART)
        held = _held(blocks if narrowed else triton.next_power_of_2(width))
        warps = _warps(held)
        _select[(rows,)](
            *row, *want, *table, splits, 2 * blocks, entries, ids, counts,
            BOUNDED=bounded, VECTOR=_vector(scores), NARROWED=narrowed, RANKED=ranked, PART=PART,
            SPLITS=triton.next_power_of_2(splits) if narrowed else 1, HELD=held, HALVINGS=HALVINGS if held else -1,
            LINE=LINE, TILE=TILE * warps, num_warps=warps,
        )  # fmt: skip
    if ranked:
        rank(entries, counts, ids)
    return ids, counts


def _held(number: int) -> int:
    """How many keys a program keeps in registers where there are about `number`, a power of two; 0: none."""
    return max(number, FEWEST_BLOCKS) if number <= HELD else 0


def _warps(held: int) -> int:
    """As few as the registers allow, since all wait for each other in every round: 16 keys of a thread."""
    return 8 if 0 < held <= FEWEST_BLOCKS else 16


def _vector(scores: Tensor) -> int:
    """How many neighbours may be read if one is wanted: 16 bytes where rows are whole numbers of them, or padded to."""
    batch, groups, width = scores.shape
    steps = scores.stride(0), scores.stride(1)
    whole = triton.cdiv(width, 4) * 4
    end = scores.storage_offset() + max(batch - 1, 0) * steps[0] + max(groups - 1, 0) * steps[1] + whole
    room = end * scores.element_size() <= scores.untyped_storage().nbytes()
    return 4 if width % 4 == 0 or (room and not any(step % 4 for step in steps)) else 1


def _narrow(
    row: tuple[Tensor, int, int, int],
    want: tuple[Tensor, int, int, int, int, int, int, int],
    rows: int,
    width: int,
    blocks: int,
    bounded: bool,
) -> tuple[Tensor, ...]:
    """Candidates among which what every row wants lies, and where each part of a row left its own."""
    device, splits, vector = row[0].device, triton.cdiv(width, PART), _vector(row[0])
    maxima = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    floors, sizes = torch.empty((2, rows, LINE), dtype=torch.int32, device=device)
    best = torch.empty((rows, 2 * blocks), dtype=torch.float32, device=device)
    positions, marks = torch.empty((2, rows, 2 * blocks), dtype=torch.int32, device=device)
    starts, found, shifts = torch.empty((3, rows, splits), dtype=torch.int32, device=device)
    held, columns = _held(blocks), min(1024 if rows >= CROWD else 256, blocks)
    warps = _warps(held)
    _maxima[(rows, blocks // columns)](
        *row, *want, maxima, blocks, BOUNDED=bounded, HELD=held, VECTOR=vector, DEPTH=4096 // columns, COLUMNS=columns
    )
    _floors[(rows,)](
        row[3], *want, maxima, blocks, floors, sizes,
        BOUNDED=bounded, HELD=held, LINE=LINE, TILE=TILE * warps, num_warps=warps,
    )  # fmt: skip
    _collect[(rows, triton.cdiv(splits, max(triton.cdiv(splits * rows, COLLECTORS), 1)))](
        *row, *want, floors, sizes, best, positions, marks, 2 * blocks, starts, found, splits,
        BOUNDED=bounded, HELD=held, VECTOR=vector, LINE=LINE, TILE=PART, num_warps=1,
    )  # fmt: skip
    return sizes, best, positions, marks, starts, found, shifts


@triton.jit
def _wanted(
    groups: tl.tensor,
    lengths: tl.tensor,
    kept: tl.tensor,
    last: tl.tensor,
    reserved: tl.tensor,
    unit: tl.tensor,
    numerator: tl.tensor,
    denominator: tl.tensor,
    minimum: tl.tensor,
    BOUNDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """How many of a row are to be chosen, among how many (0 when none is wanted), and how many follow them."""
    batch = tl.program_id(0) // groups
    length = (tl.maximum(tl.load(lengths + batch) - reserved, 0) + (unit - 1)) // unit
    ending = tl.minimum(length, last)
    others = length - ending
    count = tl.minimum(others, kept)
    if BOUNDED:
        # Tensors, whatever the compiler took for a constant; unsigned, which takes fewer registers.
        by = (length * 0 + denominator).to(tl.uint64)
        size = (length.to(tl.uint64) * (length * 0 + numerator).to(tl.uint64) + (by - 1)) // by
        size = tl.minimum(tl.maximum(size.to(tl.int32), minimum), length)
        count = tl.minimum(count, tl.maximum(size - ending, 0))
    return count, tl.where(count > 0, others, 0), length


@triton.jit
def _row_of(
    scores: tl.tensor, batch_stride: tl.tensor, group_stride: tl.tensor, groups: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    row = tl.program_id(0)
    batch = row // groups
    group = (row - batch * groups).to(tl.int64)
    return row.to(tl.int64), scores + batch.to(tl.int64) * batch_stride + group * group_stride


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
    unit: tl.tensor,
    numerator: tl.tensor,
    denominator: tl.tensor,
    minimum: tl.tensor,
    maxima: tl.tensor,
    blocks: tl.tensor,
    BOUNDED: tl.constexpr,
    HELD: tl.constexpr,
    VECTOR: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Block i holds the positions i, i + blocks, ...: neighbours, often high together, lie in different ones."""
    row, source = _row_of(scores, batch_stride, group_stride, groups)
    _, others, _ = _wanted(groups, lengths, kept, last, reserved, unit, numerator, denominator, minimum, BOUNDED)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    best = tl.full([DEPTH, COLUMNS], LOWEST, tl.int32)
    if others > HELD:
        for start in range(0, tl.cdiv(others, blocks), DEPTH):
            offset = (start + tl.arange(0, DEPTH))[:, None] * blocks + column[None, :]
            best = tl.maximum(best, load_keys(source, offset, others, True, VECTOR))
        tl.store(maxima + row * blocks + column, tl.max(best, 0))


@triton.jit
def _floors(
    groups: tl.tensor,
    lengths: tl.tensor,
    kept: tl.tensor,
    last: tl.tensor,
    reserved: tl.tensor,
    unit: tl.tensor,
    numerator: tl.tensor,
    denominator: tl.tensor,
    minimum: tl.tensor,
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
    count, others, _ = _wanted(groups, lengths, kept, last, reserved, unit, numerator, denominator, minimum, BOUNDED)
    stop = tl.minimum(others, blocks)
    if others > HELD:
        if HELD:
            keys = load_keys(maxima + row * blocks, tl.arange(0, HELD), stop, False, 4)
            low, _, _ = cut_held(keys, stop, count, count + count // 16, HELD)
        else:
            low, _, _ = cut(maxima + row * blocks, stop, count, count + count // 16, False, 4, TILE)
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
    unit: tl.tensor,
    numerator: tl.tensor,
    denominator: tl.tensor,
    minimum: tl.tensor,
    floors: tl.tensor,
    sizes: tl.tensor,
    best: tl.tensor,
    positions: tl.tensor,
    marks: tl.tensor,
    capacity: tl.tensor,
    starts: tl.tensor,
    found: tl.tensor,
    splits: tl.tensor,
    BOUNDED: tl.constexpr,
    HELD: tl.constexpr,
    VECTOR: tl.constexpr,
    LINE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Append what reaches the floor; parts of a row come in any order, and note where theirs are."""
    row, source = _row_of(scores, batch_stride, group_stride, groups)
    _, others, _ = _wanted(groups, lengths, kept, last, reserved, unit, numerator, denominator, minimum, BOUNDED)
    if others > HELD:
        floor = tl.load(floors + row * LINE)
        floor = tl.where(floor < 0, floor ^ HIGHEST, floor).to(tl.float32, bitcast=True)
        for split in range(tl.program_id(1), tl.cdiv(others, TILE), tl.num_programs(1)):
            position = split * TILE + tl.arange(0, TILE)
            score = tl.load(source + position, mask=position // VECTOR * VECTOR < others, other=0.0)
            taken = (position < others) & (score >= floor)
            behind = tl.cumsum(taken.to(tl.int32), 0)
            number = tl.sum(taken.to(tl.int32), 0)
            start = tl.atomic_add(sizes + row * LINE, number, sem="relaxed")
            place = start + behind - 1
            fits = taken & (place < capacity)
            tl.store(best + row * capacity + place, score, mask=fits)
            tl.store(positions + row * capacity + place, position, mask=fits)
            if split * TILE < capacity:
                tl.store(marks + row * capacity + position, tl.zeros([TILE], tl.int32), mask=position < capacity)
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
        tl.store(entries + place, entry_of(keys, positions), mask=chosen)
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
    unit: tl.tensor,
    numerator: tl.tensor,
    denominator: tl.tensor,
    minimum: tl.tensor,
    sizes: tl.tensor,
    best: tl.tensor,
    positions: tl.tensor,
    marks: tl.tensor,
    starts: tl.tensor,
    found: tl.tensor,
    shifts: tl.tensor,
    splits: tl.tensor,
    capacity: tl.tensor,
    entries: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    BOUNDED: tl.constexpr,
    VECTOR: tl.constexpr,
    NARROWED: tl.constexpr,
    RANKED: tl.constexpr,
    PART: tl.constexpr,
    SPLITS: tl.constexpr,
    HELD: tl.constexpr,
    HALVINGS: tl.constexpr,
    LINE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write a row's best by position, or as entries."""
    row, source = _row_of(scores, batch_stride, group_stride, groups)
    count, others, length = _wanted(
        groups, lengths, kept, last, reserved, unit, numerator, denominator, minimum, BOUNDED
    )
    ending = tl.minimum(length, last)
    total = count + ending
    tl.store(counts + row, total)
    ids += row * (kept + last)
    entries += row * kept
    lane = tl.arange(0, TILE)
    size = others
    small = False
    # Rows that a program can hold are read from where they are, however long others may be.
    if NARROWED:
        distant = others > HELD
    else:
        distant: tl.constexpr = False  # type: ignore[no-redef]
    if distant:
        size = tl.load(sizes + row * LINE)
        small = size <= capacity
        best += row * capacity
        positions += row * capacity
        marks += row * capacity
        shifts += row * splits
        # The first candidate by position of each part that has any is marked; how far its list was moved is noted.
        split = tl.arange(0, SPLITS)
        number = tl.load(found + row * splits + split, mask=split * PART < others, other=0)
        start = tl.load(starts + row * splits + split, mask=split * PART < others, other=0)
        some = number > 0
        before = tl.cumsum(number, 0) - number
        tl.store(shifts + tl.cumsum(some.to(tl.int32), 0) - 1, start - before, mask=some)
        tl.store(marks + before, tl.full([SPLITS], 1, tl.int32), mask=some & (before < capacity))
        tl.debug_barrier()
    surer = count * 0
    tied = count * 0
    if count == 0:
        pass
    elif size <= HELD:
        # The least power of two that holds them: half as many keys take half the time.
        for halving in tl.static_range(HALVINGS + 1):
            if (size <= HELD >> halving) & ((halving == HALVINGS) | (size > HELD >> (halving + 1))):
                position = tl.arange(0, HELD >> halving)
                if distant:
                    key, position, _ = _candidate(position, size, best, positions, marks, shifts, 0)
                else:
                    key = load_keys(source, position, size, True, VECTOR)
                low, top, above = cut_held(key, size, count, count, HELD >> halving)
                _write(key, position, low, top, count - above, surer, tied, kept, ids, entries, RANKED)
    elif small:
        low, top, above = cut(best, size, count, count, True, 4, TILE)
        parts = count * 0
        for begin in range(0, size, TILE):
            key, position, parts = _candidate(begin + lane, size, best, positions, marks, shifts, parts)
            surer, tied = _write(key, position, low, top, count - above, surer, tied, kept, ids, entries, RANKED)
    else:
        low, top, above = cut(source, others, count, count, True, VECTOR, TILE)
        for begin in range(0, others, TILE):
            key = load_keys(source, begin + lane, others, True, VECTOR)
            surer, tied = _write(key, begin + lane, low, top, count - above, surer, tied, kept, ids, entries, RANKED)
    if not RANKED:
        _end(ids, count, total, length, kept + last, TILE)


@triton.jit
def _search(
    scores: tl.tensor,
    batch_stride: tl.tensor,
    group_stride: tl.tensor,
    groups: tl.tensor,
    lengths: tl.tensor,
    kept: tl.tensor,
    last: tl.tensor,
    reserved: tl.tensor,
    unit: tl.tensor,
    numerator: tl.tensor,
    denominator: tl.tensor,
    minimum: tl.tensor,
    found: tl.tensor,
    entries: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    BOUNDED: tl.constexpr,
    VECTOR: tl.constexpr,
    RANKED: tl.constexpr,
    BLOCKS: tl.constexpr,
    HALVINGS: tl.constexpr,
    DEPTH: tl.constexpr,
    READ: tl.constexpr,
) -> None:
    """`_maxima`, `_floors`, `_collect` and `_select` by one program, whose candidates come by position."""
    row, source = _row_of(scores, batch_stride, group_stride, groups)
    count, others, length = _wanted(
        groups, lengths, kept, last, reserved, unit, numerator, denominator, minimum, BOUNDED
    )
    wanted = count + tl.minimum(length, last)
    tl.store(counts + row, wanted)
    ids += row * (kept + last)
    entries += row * kept
    keys = found + row * BLOCKS
    positions = found + (row + tl.num_programs(0)) * BLOCKS
    block = tl.arange(0, BLOCKS)
    lane = tl.arange(0, READ)
    none = count * 0
    surer = none
    tied = none
    size = others
    distant = others > BLOCKS
    if distant:
        best = tl.full([BLOCKS], LOWEST, tl.int32)
        for start in range(0, tl.cdiv(others, BLOCKS), DEPTH):
            offset = (start + tl.arange(0, DEPTH))[:, None] * BLOCKS + block[None, :]
            best = tl.maximum(best, tl.max(load_keys(source, offset, others, True, VECTOR), 0))
        floor, _, _ = cut_held(best, none + BLOCKS, count, count + count // 16, BLOCKS)
        size = none
        # Two halves are numbered by one sum of 16 bits each.
        middle: tl.constexpr = READ // 2
        half = tl.arange(0, middle)
        for begin in range(0, others, READ):
            key = load_keys(source, begin + half, others, True, VECTOR)
            taken = (key >= floor) & (begin + half < others)
            other = load_keys(source, begin + middle + half, others, True, VECTOR)
            also = (other >= floor) & (begin + middle + half < others)
            packed = taken.to(tl.int32) | (also.to(tl.int32) << 16)
            within = tl.cumsum(packed, 0)
            total = tl.sum(packed, 0)
            place = size + (within & 0xFFFF) - 1
            tl.store(keys + place, key, mask=taken & (place < BLOCKS))
            tl.store(positions + place, begin + half, mask=taken & (place < BLOCKS))
            place = size + (total & 0xFFFF) + (within >> 16) - 1
            tl.store(keys + place, other, mask=also & (place < BLOCKS))
            tl.store(positions + place, begin + middle + half, mask=also & (place < BLOCKS))
            size += (total & 0xFFFF) + (total >> 16)
        tl.debug_barrier()
    if count == 0:
        pass
    elif size <= BLOCKS:
        # The least power of two that holds them: half as many keys take half the time.
        for halving in tl.static_range(HALVINGS + 1):
            if (size <= BLOCKS >> halving) & ((halving == HALVINGS) | (size > BLOCKS >> (halving + 1))):
                position = tl.arange(0, BLOCKS >> halving)
                if distant:
                    key = load_keys(keys, position, size, False, 4)
                    position = tl.load(positions + position, mask=position < size, other=0)
                else:
                    key = load_keys(source, position, size, True, VECTOR)
                low, top, above = cut_held(key, size, count, count, BLOCKS >> halving)
                _write(key, position, low, top, count - above, surer, tied, kept, ids, entries, RANKED)
    else:
        low, top, above = cut(source, others, count, count, True, VECTOR, READ)
        for begin in range(0, others, READ):
            key = load_keys(source, begin + lane, others, True, VECTOR)
            surer, tied = _write(key, begin + lane, low, top, count - above, surer, tied, kept, ids, entries, RANKED)
    if not RANKED:
        _end(ids, count, wanted, length, kept + last, READ)


@triton.jit
def _end(
    ids: tl.tensor, count: tl.tensor, total: tl.tensor, length: tl.tensor, slots: tl.tensor, TILE: tl.constexpr
) -> None:
    """The row's last entries behind those chosen, -1 behind them."""
    for begin in range(count, slots, TILE):
        slot = begin + tl.arange(0, TILE)
        tl.store(ids + slot, tl.where(slot < total, length - total + slot, -1), mask=slot < slots)


@triton.jit
def _candidate(
    nth: tl.tensor,
    size: tl.tensor,
    best: tl.tensor,
    positions: tl.tensor,
    marks: tl.tensor,
    shifts: tl.tensor,
    parts: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The n-th candidates by position, `parts` parts of the row having begun before them, and how many have then."""
    present = nth < size
    mark = tl.load(marks + nth, mask=present, other=0)
    place = nth + tl.load(shifts + parts + tl.cumsum(mark, 0) - 1, mask=present, other=0)
    key = keys_of(tl.load(best + place, mask=present, other=0.0))
    position = tl.load(positions + place, mask=present, other=0)
    return tl.where(present, key, LOWEST), position, parts + tl.sum(mark, 0)
