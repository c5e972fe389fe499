"""Exact top-k on CUDA: the cut is found by counting, so that ties, infinities and clusters are like any other scores.

Short rows take one launch, in which one program per row searches the cut. Of longer ones what cannot be chosen is left
out first: with a row dealt into at least k blocks, the k-th best of the blocks' maxima is reached by at least k scores,
so that no score below it belongs to the best k. Usually little more than k remain; when too many do, as among equal
scores, the row itself is searched. Where few are wanted, as of pages, the row's program does that too; else three
launches of many programs do it before, or one where the best of neighbours is known. The way taken changes nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._checks import NEIGHBOURS
from saccade.kernels._share import Share
from saccade.kernels._triton.alone import ALONE, HALVINGS, search
from saccade.kernels._triton.cut import HIGHEST, LOWEST, cut, cut_held, keys_of, load_keys
from saccade.kernels._triton.early import await_previous, early
from saccade.kernels._triton.ranking import rank
from saccade.kernels._triton.row import put_chosen, put_last, row_of, vector_of, wanted_of

DIRECT = 8192
"""Rows up to this width are searched without narrowing them first: three more launches cost more."""
HELD = 8192
"""The most keys that a program keeps in registers while it searches their cut."""
TILE = 256
"""Entries that a warp looks at together where they are not held."""
PART = 512
"""Entries of a row whose candidates one warp collects."""
TILED_PART = 2048
"""Entries of a row whose candidates a program collects that has found the floor itself."""
FEWEST_BLOCKS = 4096
"""Fewer would be as slow to search; so many keys at least a program is made to hold."""
CROWD = 256
"""Of so many rows each takes fewer programs to look for maxima: those that have nothing to do cost their launch."""
COLLECTORS = 4096
"""Programs that collect candidates, about what a device runs at once: of more rows, each takes several parts."""
LINE = 32
"""Counters of a cache line: those of two rows never share one, or their atomic additions would wait for each other."""


def topk(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    last: int,
    reserved: int,
    unit: int,
    share: Share | None,
    ranked: bool,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The best `k` before the `last` entries of each row, fewer where a share says so, and these last entries.

    `tiles`: float32 `[B, G, T]`, contiguous, the best of NEIGHBOURS scores each. Of a few entries the floor follows
    from them at once, and two launches are enough.
    """
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

    if ALONE.blocks_of(kept, width):
        search(ALONE, row, want, entries, ids, counts, bounded, ranked)
    else:
        blocks = max(FEWEST_BLOCKS, triton.next_power_of_2(2 * kept))
        narrowed = kept > 0 and width > DIRECT and width >= 2 * blocks
        held = _held(blocks if narrowed else triton.next_power_of_2(width))
        few = narrowed and rows <= CROWD and NEIGHBOURS * (kept + 1) <= held
        near = tiles if few and tiles is not None and tiles.shape[2] <= HELD else None
        part, capacity = PART, 2 * blocks
        if near is not None:
            part = TILED_PART
            capacity = triton.cdiv(width, part) * part
        splits = triton.cdiv(width, part)
        table = _narrow(row, want, rows, blocks, held, bounded, near, part, capacity) if narrowed else (lengths,) * 7
        warps = _warps(held)
        _select[(rows,)](
            *row, *want, *table, splits, capacity, entries, ids, counts,
            BOUNDED=bounded, VECTOR=vector_of(scores), NARROWED=narrowed, TILED=near is not None, RANKED=ranked,
            PART=part, SPLITS=triton.next_power_of_2(splits) if narrowed else 1, HELD=held,
            HALVINGS=HALVINGS if held else -1, LINE=LINE, TILE=TILE * warps, num_warps=warps,
            **early(scores.device, batch, groups),
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


def _narrow(
    row: tuple[Tensor, int, int, int],
    want: tuple[Tensor, int, int, int, int, int, int, int],
    rows: int,
    blocks: int,
    held: int,
    bounded: bool,
    near: Tensor | None,
    part: int,
    capacity: int,
) -> tuple[Tensor, ...]:
    """Candidates among which what every row wants lies, and where each part of a row left its own.

    With the best of neighbours each part finds the floor itself, and leaves its candidates where it lies.
    """
    device, vector = row[0].device, vector_of(row[0])
    splits = triton.cdiv(row[0].shape[2], part)
    best = torch.empty((rows, capacity), dtype=torch.float32, device=device)
    positions, marks = torch.empty((2, rows, capacity), dtype=torch.int32, device=device)
    starts, found, shifts = torch.empty((3, rows, splits), dtype=torch.int32, device=device)
    if near is None:
        maxima = torch.empty((rows, blocks), dtype=torch.int32, device=device)
        floors, sizes = torch.empty((2, rows, LINE), dtype=torch.int32, device=device)
        columns, warps = min(1024 if rows >= CROWD else 256, blocks), _warps(held)
        _maxima[(rows, blocks // columns)](
            *row, *want, maxima, blocks,
            BOUNDED=bounded, HELD=held, VECTOR=vector, DEPTH=4096 // columns, COLUMNS=columns,
        )  # fmt: skip
        _floors[(rows,)](
            row[3], *want, maxima, blocks, floors, sizes,
            BOUNDED=bounded, HELD=held, LINE=LINE, TILE=TILE * warps, num_warps=warps,
        )  # fmt: skip
    else:
        floors, sizes = near, starts
    _collect[(rows, triton.cdiv(splits, max(triton.cdiv(splits * rows, COLLECTORS), 1)))](
        *row, *want, floors, sizes, best, positions, marks, capacity, starts, found, splits, floors.shape[-1],
        BOUNDED=bounded, HELD=held, VECTOR=vector, TILE=part,
        TILES=0 if near is None else triton.next_power_of_2(near.shape[2]), NEAR=NEIGHBOURS,
        num_warps=1 if near is None else 4, **early(device, *row[0].shape[:2]),
    )  # fmt: skip
    return sizes, best, positions, marks, starts, found, shifts


@triton.jit
def _maxima(
    scores: tl.tensor, batch_stride: tl.tensor, group_stride: tl.tensor, groups: tl.tensor, lengths: tl.tensor,
    kept: tl.tensor, last: tl.tensor, reserved: tl.tensor, unit: tl.tensor, numerator: tl.tensor,
    denominator: tl.tensor, minimum: tl.tensor, maxima: tl.tensor, blocks: tl.tensor,
    BOUNDED: tl.constexpr, HELD: tl.constexpr, VECTOR: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Block i holds the positions i, i + blocks, ...: neighbours, often high together, lie in different ones."""
    row, source = row_of(scores, batch_stride, group_stride, groups)
    _, others, _ = wanted_of(groups, lengths, kept, last, reserved, unit, numerator, denominator, minimum, BOUNDED)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    best = tl.full([DEPTH, COLUMNS], LOWEST, tl.int32)
    if others > HELD:
        for start in range(0, tl.cdiv(others, blocks), DEPTH):
            offset = (start + tl.arange(0, DEPTH))[:, None] * blocks + column[None, :]
            best = tl.maximum(best, load_keys(source, offset, others, True, VECTOR))
        tl.store(maxima + row * blocks + column, tl.max(best, 0))


@triton.jit
def _floors(
    groups: tl.tensor, lengths: tl.tensor, kept: tl.tensor, last: tl.tensor, reserved: tl.tensor, unit: tl.tensor,
    numerator: tl.tensor, denominator: tl.tensor, minimum: tl.tensor, maxima: tl.tensor, blocks: tl.tensor,
    floors: tl.tensor, sizes: tl.tensor,
    BOUNDED: tl.constexpr, HELD: tl.constexpr, LINE: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """A key that enough of each row's maxima reach and few more, and an empty buffer."""
    row = tl.program_id(0).to(tl.int64)
    count, others, _ = wanted_of(groups, lengths, kept, last, reserved, unit, numerator, denominator, minimum, BOUNDED)
    stop = tl.minimum(others, blocks)
    if others > HELD:
        if HELD:
            keys = load_keys(maxima + row * blocks, tl.arange(0, HELD), stop, False, 4)
            low, _, _ = cut_held(keys, stop, count, count + count // 16, HELD)
        else:
            low, _, _ = cut(maxima + row * blocks, stop, count, count + count // 16, False, 4, TILE)
        tl.store(floors + row * LINE, low)
        tl.store(sizes + row * LINE, 0)


@triton.jit(do_not_specialize=["line"])
def _collect(
    scores: tl.tensor, batch_stride: tl.tensor, group_stride: tl.tensor, groups: tl.tensor, lengths: tl.tensor,
    kept: tl.tensor, last: tl.tensor, reserved: tl.tensor, unit: tl.tensor, numerator: tl.tensor,
    denominator: tl.tensor, minimum: tl.tensor, floors: tl.tensor, sizes: tl.tensor, best: tl.tensor,
    positions: tl.tensor, marks: tl.tensor, capacity: tl.tensor, starts: tl.tensor, found: tl.tensor, splits: tl.tensor,
    line: tl.tensor, BOUNDED: tl.constexpr, HELD: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, NEAR: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Append what reaches the floor; parts of a row come in any order, and note where theirs are.

    Where `floors` are the best of NEAR neighbours each, the floor is what as many of them reach as are wanted; of the
    row's last neighbours not all need be candidates, and their best is left out.
    """
    await_previous(EARLY)
    row, source = row_of(scores, batch_stride, group_stride, groups)
    count, others, _ = wanted_of(groups, lengths, kept, last, reserved, unit, numerator, denominator, minimum, BOUNDED)
    if others > HELD:
        if TILES:
            whole = others // NEAR
            near = load_keys(floors + row * line, tl.arange(0, TILES), whole, True, 1)
            floor, _, _ = cut_held(near, whole, count, count + count // 16, TILES)
        else:
            floor = tl.load(floors + row * line)
        floor = tl.where(floor < 0, floor ^ HIGHEST, floor).to(tl.float32, bitcast=True)
        for split in range(tl.program_id(1), tl.cdiv(others, TILE), tl.num_programs(1)):
            position = split * TILE + tl.arange(0, TILE)
            score = tl.load(source + position, mask=position // VECTOR * VECTOR < others, other=0.0)
            taken = (position < others) & (score >= floor)
            behind = tl.cumsum(taken.to(tl.int32), 0)
            number = tl.sum(taken.to(tl.int32), 0)
            start = split * TILE if TILES else tl.atomic_add(sizes + row * line, number, sem="relaxed")
            place = start + behind - 1
            fits = taken & (place < capacity)
            tl.store(best + row * capacity + place, score, mask=fits)
            tl.store(positions + row * capacity + place, position, mask=fits)
            if split * TILE < capacity:
                tl.store(marks + row * capacity + position, tl.zeros([TILE], tl.int32), mask=position < capacity)
            tl.store(starts + row * splits + split, start)
            tl.store(found + row * splits + split, number)


@triton.jit
def _select(
    scores: tl.tensor, batch_stride: tl.tensor, group_stride: tl.tensor, groups: tl.tensor, lengths: tl.tensor,
    kept: tl.tensor, last: tl.tensor, reserved: tl.tensor, unit: tl.tensor, numerator: tl.tensor,
    denominator: tl.tensor, minimum: tl.tensor, sizes: tl.tensor, best: tl.tensor, positions: tl.tensor,
    marks: tl.tensor, starts: tl.tensor, found: tl.tensor, shifts: tl.tensor, splits: tl.tensor, capacity: tl.tensor,
    entries: tl.tensor, ids: tl.tensor, counts: tl.tensor,
    BOUNDED: tl.constexpr, VECTOR: tl.constexpr, NARROWED: tl.constexpr, TILED: tl.constexpr, RANKED: tl.constexpr,
    PART: tl.constexpr, SPLITS: tl.constexpr, HELD: tl.constexpr, HALVINGS: tl.constexpr, LINE: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Write a row's best by position, or as entries."""
    await_previous(EARLY)
    row, source = row_of(scores, batch_stride, group_stride, groups)
    count, others, length = wanted_of(
        groups, lengths, kept, last, reserved, unit, numerator, denominator, minimum, BOUNDED
    )
    total = count + tl.minimum(length, last)
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
        best += row * capacity
        positions += row * capacity
        marks += row * capacity
        shifts += row * splits
        # The first candidate by position of each part that has any is marked; how far its list was moved is noted.
        split = tl.arange(0, SPLITS)
        number = tl.load(found + row * splits + split, mask=split * PART < others, other=0)
        start = tl.load(starts + row * splits + split, mask=split * PART < others, other=0)
        # Parts that lie apart are no list.
        size = tl.sum(number, 0) if TILED else tl.load(sizes + row * LINE)
        small = (size <= capacity) & (not TILED)
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
                put_chosen(key, position, low, top, count - above, surer, tied, kept, ids, entries, RANKED)
    elif small:
        low, top, above = cut(best, size, count, count, True, 4, TILE)
        parts = count * 0
        for begin in range(0, size, TILE):
            key, position, parts = _candidate(begin + lane, size, best, positions, marks, shifts, parts)
            surer, tied = put_chosen(key, position, low, top, count - above, surer, tied, kept, ids, entries, RANKED)
    else:
        low, top, above = cut(source, others, count, count, True, VECTOR, TILE)
        for begin in range(0, others, TILE):
            key = load_keys(source, begin + lane, others, True, VECTOR)
            surer, tied = put_chosen(
                key, begin + lane, low, top, count - above, surer, tied, kept, ids, entries, RANKED
            )
    if not RANKED:
        put_last(ids, count, total, length, kept + last, TILE)


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
