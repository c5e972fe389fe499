"""Top-k of a few by one program a row, which leaves out what cannot be chosen itself."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._triton.cut import LOWEST, cut, cut_held, load_keys
from saccade.kernels._triton.early import await_previous, early
from saccade.kernels._triton.row import put_chosen, put_last, row_of, vector_of, wanted_of

HALVINGS = 3
"""So often a program may halve how many keys it holds, where a row has fewer."""


@dataclass(frozen=True, slots=True)
class Alone:
    """Where a row's program does alone what else four launches do, and how.

    Attributes:
        most: entries that are wanted of a row, at most; 0: never.
        widest: scores of a row, at most. Measured with 8,231 (docs/log.md); the bound is a guess.
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


def search(
    alone: Alone,
    row: tuple[Tensor, int, int, int],
    want: tuple[Tensor, int, int, int, int, int, int, int],
    entries: Tensor,
    ids: Tensor,
    counts: Tensor,
    bounded: bool,
    ranked: bool,
) -> None:
    """Choose `want` of every `row`, as `topk` has them, where its program is alone."""
    (scores, *_), (_, kept, *_) = row, want
    width, rows = scores.shape[2], counts.numel()
    blocks = alone.blocks_of(kept, width)
    found = torch.empty((2, rows, blocks), dtype=torch.int32, device=scores.device)
    depth = min(triton.next_power_of_2(triton.cdiv(width, blocks)), alone.deep // blocks)
    _search[(rows,)](
        *row, *want, found, entries, ids, counts,
        BOUNDED=bounded, VECTOR=vector_of(scores), RANKED=ranked, BLOCKS=blocks, HALVINGS=HALVINGS,
        DEPTH=depth, READ=alone.read, num_warps=alone.warps, **early(scores.device, *scores.shape[:2]),
    )  # fmt: skip


@triton.jit
def _search(
    scores: tl.tensor, batch_stride: tl.tensor, group_stride: tl.tensor, groups: tl.tensor, lengths: tl.tensor,
    kept: tl.tensor, last: tl.tensor, reserved: tl.tensor, unit: tl.tensor, numerator: tl.tensor,
    denominator: tl.tensor, minimum: tl.tensor, found: tl.tensor, entries: tl.tensor, ids: tl.tensor,
    counts: tl.tensor, BOUNDED: tl.constexpr, VECTOR: tl.constexpr, RANKED: tl.constexpr, BLOCKS: tl.constexpr,
    HALVINGS: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """What `saccade.kernels.topk.triton` does in four launches; candidates come by position."""
    await_previous(EARLY)
    row, source = row_of(scores, batch_stride, group_stride, groups)
    count, others, length = wanted_of(
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
                put_chosen(key, position, low, top, count - above, surer, tied, kept, ids, entries, RANKED)
    else:
        low, top, above = cut(source, others, count, count, True, VECTOR, READ)
        for begin in range(0, others, READ):
            key = load_keys(source, begin + lane, others, True, VECTOR)
            surer, tied = put_chosen(
                key, begin + lane, low, top, count - above, surer, tied, kept, ids, entries, RANKED
            )
    if not RANKED:
        put_last(ids, count, wanted, length, kept + last, READ)
