"""The union on CUDA in five launches: every position's earliest turn, the turn at which the set is full, the set.

A turn is a rank and a head, numbered rank by rank. Each belongs to one entry, so that no two positions share their
earliest turn, and the set is what comes before a turn that counting finds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Turns or positions of a program."""


def rank_union(
    ids: Tensor, counts: Tensor, limit: int, universe: int, lengths: Tensor | None, sinks: int, window: int
) -> tuple[Tensor, Tensor]:
    """The union alone, or where `lengths` are given, between the sinks and the window of each row that is longer."""
    batch, heads, width = ids.shape
    device, never = ids.device, heads * width
    earliest = torch.full((batch, universe), never, dtype=torch.int32, device=device)
    rounds, splits = max(triton.cdiv(never, TILE), 1), triton.cdiv(universe, TILE)
    firsts = torch.empty((batch, rounds), dtype=torch.int32, device=device)
    numbers = torch.empty((batch, splits), dtype=torch.int32, device=device)
    ends = torch.empty(batch, dtype=torch.int32, device=device)
    size = sinks + limit + window
    merged = torch.empty((batch, 1, size), dtype=torch.int32, device=device)
    found = torch.empty((batch, 1), dtype=torch.int32, device=device)
    lists = (ids.contiguous(), counts.contiguous(), heads, width)
    padded = {"ROUNDS": triton.next_power_of_2(rounds), "SPLITS": triton.next_power_of_2(splits)}
    _meet[(batch, rounds)](*lists, earliest, universe, TILE=TILE)
    _count_firsts[(batch, rounds)](*lists, earliest, universe, firsts, TILE=TILE)
    _count_members[(batch, splits)](
        *lists, earliest, universe, firsts, rounds, limit, ends, numbers, ROUNDS=padded["ROUNDS"], TILE=TILE
    )
    _write_members[(batch, max(splits, triton.cdiv(size, TILE)))](
        earliest, universe, ends, numbers, splits, size, merged, found,
        counts if lengths is None else lengths, sinks, window,
        FRAMED=lengths is not None, SPLITS=padded["SPLITS"], TILE=TILE,
    )  # fmt: skip
    return merged, found


@triton.jit
def _meet(
    ids: tl.tensor,
    counts: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
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
    heads: tl.tensor,
    width: tl.tensor,
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
    heads: tl.tensor,
    width: tl.tensor,
    earliest: tl.tensor,
    universe: tl.tensor,
    firsts: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    turn = tl.program_id(1) * TILE + tl.arange(0, TILE)
    number = tl.sum(_firsts(turn, ids, counts, heads, width, earliest, universe), 0)
    tl.store(firsts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), number)


@triton.jit
def _count_members(
    ids: tl.tensor,
    counts: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    earliest: tl.tensor,
    universe: tl.tensor,
    firsts: tl.tensor,
    rounds: tl.tensor,
    limit: tl.tensor,
    ends: tl.tensor,
    numbers: tl.tensor,
    ROUNDS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The turn behind the set's last one, and how many of this part's positions come before it."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    lane = tl.arange(0, TILE)
    every = tl.arange(0, ROUNDS)
    until = tl.cumsum(tl.load(firsts + row * rounds + every, mask=every < rounds, other=0), 0)
    full = tl.sum((until < limit).to(tl.int32), 0)
    end = full * 0 + heads * width
    if full < ROUNDS:
        before = tl.max(tl.where(until < limit, until, 0), 0)
        turn = full * TILE + lane
        first = _firsts(turn, ids, counts, heads, width, earliest, universe)
        last = (first > 0) & (before + tl.cumsum(first, 0) == limit)
        end = tl.max(tl.where(last, turn + 1, 0), 0)
    position = split * TILE + lane
    turns = tl.load(earliest + row * universe + position, mask=position < universe, other=end)
    tl.store(numbers + row * tl.num_programs(1) + split, tl.sum((turns < end).to(tl.int32), 0))
    tl.store(ends + row, end, mask=split == 0)


@triton.jit
def _write_members(
    earliest: tl.tensor,
    universe: tl.tensor,
    ends: tl.tensor,
    numbers: tl.tensor,
    splits: tl.tensor,
    size: tl.tensor,
    merged: tl.tensor,
    found: tl.tensor,
    lengths: tl.tensor,
    sinks: tl.tensor,
    window: tl.tensor,
    FRAMED: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    every = tl.arange(0, SPLITS)
    number = tl.load(numbers + row * splits + every, mask=every < splits, other=0)
    behind = tl.sum(number, 0)
    first = behind * 0
    total = behind
    length = behind
    end = tl.load(ends + row)
    if FRAMED:
        length = tl.load(lengths + row)
        fits = length <= size
        first = tl.where(fits, length, tl.minimum(length, sinks))
        behind = tl.where(fits, 0, behind) + first
        total = behind + tl.minimum(length - first, window)
        end = tl.where(fits, 0, end)
    slot = split * TILE + tl.arange(0, TILE)
    turns = tl.load(earliest + row * universe + slot, mask=slot < universe, other=end)
    member = turns < end
    place = first + tl.sum(tl.where(every < split, number, 0), 0) + tl.cumsum(member.to(tl.int32), 0) - 1
    merged += row * size
    tl.store(merged + place, slot + first, mask=member)
    others = tl.where(slot < first, slot, tl.where(slot < total, length - total + slot, -1))
    tl.store(merged + slot, others, mask=((slot < first) | (slot >= behind)) & (slot < size))
    tl.store(found + row, total, mask=split == 0)
