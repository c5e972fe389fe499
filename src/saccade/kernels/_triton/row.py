"""A row of scores in a kernel: what is wanted of it, and how what was chosen is written."""

import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._triton.ranking import entry_of


def vector_of(scores: Tensor) -> int:
    """How many neighbours may be read if one is wanted: 16 bytes where rows are whole numbers of them, or padded to."""
    batch, groups, width = scores.shape
    steps = scores.stride(0), scores.stride(1)
    whole = triton.cdiv(width, 4) * 4
    end = scores.storage_offset() + max(batch - 1, 0) * steps[0] + max(groups - 1, 0) * steps[1] + whole
    room = end * scores.element_size() <= scores.untyped_storage().nbytes()
    return 4 if width % 4 == 0 or (room and not any(step % 4 for step in steps)) else 1


@triton.jit
def wanted_of(
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
def row_of(
    scores: tl.tensor, batch_stride: tl.tensor, group_stride: tl.tensor, groups: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    row = tl.program_id(0)
    batch = row // groups
    group = (row - batch * groups).to(tl.int64)
    return row.to(tl.int64), scores + batch.to(tl.int64) * batch_stride + group * group_stride


@triton.jit
def put_chosen(
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
def put_last(
    ids: tl.tensor, count: tl.tensor, total: tl.tensor, length: tl.tensor, slots: tl.tensor, TILE: tl.constexpr
) -> None:
    """The row's last entries behind those chosen, -1 behind them."""
    for begin in range(count, slots, TILE):
        slot = begin + tl.arange(0, TILE)
        tl.store(ids + slot, tl.where(slot < total, length - total + slot, -1), mask=slot < slots)
