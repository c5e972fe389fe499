"""The union on CUDA: every position's earliest turn, the turn at which the set is full, the set.

A turn is a rank and a head, numbered rank by rank. Each belongs to one entry, so that no two positions share their
earliest turn, and the set is what comes before a turn that counting finds.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Turns or positions of a program."""

_NEVER = tl.constexpr(2**31 - 1)


class _Lists(NamedTuple):
    """Rankings int32 `[B, Hq, M]`, how long they are, and how many earliest turns every TILE of turns has."""

    ids: Tensor
    counts: Tensor
    width: int
    firsts: Tensor
    rounds: int


def rank_union(
    ids: Tensor,
    counts: Tensor,
    limit: int,
    universe: int,
    lengths: Tensor,
    sinks: int,
    window: int,
    rest: Callable[[Tensor], tuple[Tensor, Tensor]] | None,
) -> tuple[Tensor, Tensor]:
    batch, heads, _ = ids.shape
    earliest = torch.empty((batch, universe), dtype=torch.int32, device=ids.device)
    splits, size = triton.cdiv(universe, TILE), sinks + limit + window
    numbers, ends, short = earliest.new_empty(batch, splits), earliest.new_empty(batch), earliest.new_empty(batch)
    merged, found = earliest.new_empty(batch, 1, size), earliest.new_empty(batch, 1)
    _clear[(batch, splits)](earliest, universe, lengths, size, TILE=TILE)
    best = whole = _met(ids, counts, earliest)
    if rest is not None:
        _find_short[(batch,)](
            best.firsts, best.rounds, lengths, limit, size, short, ROUNDS=triton.next_power_of_2(best.rounds)
        )
        whole = _met(*rest(short), earliest)
    _count_members[(batch, splits)](
        *best, *whole, short, heads, earliest, universe, lengths, limit, ends, numbers,
        RESTED=rest is not None,
        ROUNDS=triton.next_power_of_2(max(best.rounds, whole.rounds)), TILE=TILE,
    )  # fmt: skip
    _write_members[(batch, max(splits, triton.cdiv(size, TILE)))](
        earliest, universe, lengths, ends, numbers, splits, size, merged, found, sinks, window,
        SPLITS=triton.next_power_of_2(splits), TILE=TILE,
    )  # fmt: skip
    return merged, found


def _met(ids: Tensor, counts: Tensor, earliest: Tensor) -> _Lists:
    """Lower every position's earliest turn to those that it has in these lists, and count them."""
    (batch, heads, width), universe = ids.shape, earliest.shape[1]
    rounds = max(triton.cdiv(heads * width, TILE), 1)
    firsts = torch.empty((batch, rounds), dtype=torch.int32, device=ids.device)
    lists = _Lists(ids.contiguous(), counts.contiguous(), width, firsts, rounds)
    _meet[(batch, rounds)](*lists[:3], heads, earliest, universe, TILE=TILE)
    _count_firsts[(batch, rounds)](*lists[:4], heads, earliest, universe, TILE=TILE)
    return lists


@triton.jit
def _clear(
    earliest: tl.tensor,
    universe: tl.tensor,
    lengths: tl.tensor,
    size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """No turn yet for the positions that will be looked at."""
    position = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if tl.program_id(1) * TILE < tl.maximum(_length(lengths), size):
        start = tl.program_id(0).to(tl.int64) * universe
        tl.store(earliest + start + position, tl.full([TILE], _NEVER, tl.int32), mask=position < universe)


@triton.jit
def _meet(
    ids: tl.tensor,
    counts: tl.tensor,
    width: tl.tensor,
    heads: tl.tensor,
    earliest: tl.tensor,
    universe: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Lower every position's earliest turn to each turn that it has."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * TILE + tl.arange(0, TILE)
    head = entry // width
    rank = entry - head * width
    present = (head < heads) & (rank < tl.load(counts + row * heads + head, mask=head < heads, other=0))
    position = tl.load(ids + row * heads * width + entry, mask=present, other=0)
    tl.atomic_min(earliest + row * universe + position, rank * heads + head, mask=present, sem="relaxed")


@triton.jit
def _firsts(
    turn: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    width: tl.tensor,
    heads: tl.tensor,
    earliest: tl.tensor,
    universe: tl.tensor,
) -> tl.tensor:
    """1 where a position has its earliest turn, else 0."""
    row = tl.program_id(0).to(tl.int64)
    rank = turn // heads
    head = turn - rank * heads
    present = (rank < width) & (rank < tl.load(counts + row * heads + head, mask=rank < width, other=0))
    position = tl.load(ids + (row * heads + head) * width + rank, mask=present, other=0)
    return (tl.load(earliest + row * universe + position, mask=present, other=-1) == turn).to(tl.int32)


@triton.jit
def _count_firsts(
    ids: tl.tensor,
    counts: tl.tensor,
    width: tl.tensor,
    firsts: tl.tensor,
    heads: tl.tensor,
    earliest: tl.tensor,
    universe: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    turn = tl.program_id(1) * TILE + tl.arange(0, TILE)
    number = tl.sum(_firsts(turn, ids, counts, width, heads, earliest, universe), 0)
    tl.store(firsts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), number)


@triton.jit
def _find_short(
    firsts: tl.tensor,
    rounds: tl.tensor,
    lengths: tl.tensor,
    limit: tl.tensor,
    size: tl.tensor,
    short: tl.tensor,
    ROUNDS: tl.constexpr,
) -> None:
    """The length of a row that is larger than its set and whose lists do not fill this, else 0."""
    row = tl.program_id(0)
    every = tl.arange(0, ROUNDS)
    found = tl.sum(tl.load(firsts + row * rounds + every, mask=every < rounds, other=0), 0)
    length = tl.load(lengths + row)
    tl.store(short + row, tl.where((found < limit) & (length > size), length, 0))


@triton.jit
def _count_members(
    ids: tl.tensor, counts: tl.tensor, width: tl.tensor, firsts: tl.tensor, rounds: tl.tensor, whole_ids: tl.tensor,
    whole_counts: tl.tensor, whole_width: tl.tensor, whole_firsts: tl.tensor, whole_rounds: tl.tensor,
    short: tl.tensor, heads: tl.tensor, earliest: tl.tensor, universe: tl.tensor, lengths: tl.tensor,
    limit: tl.tensor, ends: tl.tensor, numbers: tl.tensor, RESTED: tl.constexpr,
    ROUNDS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """The turn behind the set's last one, and how many of this part's positions come before it."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    if RESTED:
        others = tl.load(short + row) > 0
        ids = tl.where(others, whole_ids, ids)
        counts = tl.where(others, whole_counts, counts)
        width = tl.where(others, whole_width, width)
        firsts = tl.where(others, whole_firsts, firsts)
        rounds = tl.where(others, whole_rounds, rounds)
    lane = tl.arange(0, TILE)
    every = tl.arange(0, ROUNDS)
    # Behind a row's end nothing was chosen, and nobody asks.
    if split * TILE < _length(lengths):
        until = tl.cumsum(tl.load(firsts + row * rounds + every, mask=every < rounds, other=0), 0)
        full = tl.sum((until < limit).to(tl.int32), 0)
        end = full * 0 + _NEVER
        if full < ROUNDS:
            before = tl.max(tl.where(until < limit, until, 0), 0)
            turn = full * TILE + lane
            first = _firsts(turn, ids, counts, width, heads, earliest, universe)
            last = (first > 0) & (before + tl.cumsum(first, 0) == limit)
            end = tl.max(tl.where(last, turn + 1, 0), 0)
        position = split * TILE + lane
        turns = tl.load(earliest + row * universe + position, mask=position < universe, other=end)
        tl.store(numbers + row * tl.num_programs(1) + split, tl.sum((turns < end).to(tl.int32), 0))
        tl.store(ends + row, end, mask=split == 0)


@triton.jit
def _length(lengths: tl.tensor) -> tl.tensor:
    """A bound on the row's positions, at least 1."""
    return tl.maximum(tl.load(lengths + tl.program_id(0)), 1)


@triton.jit
def _write_members(
    earliest: tl.tensor, universe: tl.tensor, lengths: tl.tensor, ends: tl.tensor, numbers: tl.tensor,
    splits: tl.tensor, size: tl.tensor, merged: tl.tensor, found: tl.tensor, sinks: tl.tensor, window: tl.tensor,
    SPLITS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    every = tl.arange(0, SPLITS)
    bound = _length(lengths)
    if split * TILE < tl.maximum(bound, size):
        number = tl.load(numbers + row * splits + every, mask=every * TILE < tl.minimum(bound, universe), other=0)
        behind = tl.sum(number, 0)
        length = tl.load(lengths + row)
        fits = length <= size
        first = tl.where(fits, length, tl.minimum(length, sinks))
        behind = tl.where(fits, 0, behind) + first
        total = behind + tl.minimum(length - first, window)
        end = tl.where(fits, 0, tl.load(ends + row))
        slot = split * TILE + tl.arange(0, TILE)
        turns = tl.load(earliest + row * universe + slot, mask=slot < universe, other=end)
        member = turns < end
        place = first + tl.sum(tl.where(every < split, number, 0), 0) + tl.cumsum(member.to(tl.int32), 0) - 1
        merged += row * size
        tl.store(merged + place, slot + first, mask=member)
        others = tl.where(slot < first, slot, tl.where(slot < total, length - total + slot, -1))
        tl.store(merged + slot, others, mask=((slot < first) | (slot >= behind)) & (slot < size))
        tl.store(found + row, total, mask=split == 0)
