"""The key that the best scores of a row reach, found by counting: each round quarters the range in which it lies."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
"""Below the key of every number."""
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def keys_of(scores: tl.tensor) -> tl.tensor:
    """Integers that compare as the floats do; -0.0 becomes 0.0."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(bits == LOWEST, 0, bits)
    return tl.where(bits < 0, bits ^ HIGHEST, bits)


@triton.jit
def load_keys(
    source: tl.tensor, offset: tl.tensor, stop: tl.tensor, FLOATS: tl.constexpr, VECTOR: tl.constexpr
) -> tl.tensor:
    """Keys, LOWEST from `stop` on. VECTOR neighbours are read or left out together, which one load can do."""
    inside = offset // VECTOR * VECTOR < stop
    if FLOATS:
        return tl.where(offset < stop, keys_of(tl.load(source + offset, mask=inside, other=0.0)), LOWEST)
    else:
        return tl.where(offset < stop, tl.load(source + offset, mask=inside, other=LOWEST), LOWEST)


@triton.jit
def _inner(low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Three bounds between quarters of a range."""
    return low + ((high - low) >> 2), low + ((high - low) >> 1), low + (((high - low) * 3) >> 2)


@triton.jit
def _reach(keys: tl.tensor, low: tl.tensor, high: tl.tensor, COUNTS: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """1 for each of three bounds that a key reaches, in BITS bits each."""
    first, second, third = _inner(low, high)
    counts = (keys >= first.to(tl.int32)).to(COUNTS)
    counts += (keys >= second.to(tl.int32)).to(COUNTS) << BITS
    return counts + ((keys >= third.to(tl.int32)).to(COUNTS) << (2 * BITS))


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
def cut_held(
    keys: tl.tensor, size: tl.tensor, count: tl.tensor, enough: tl.tensor, HELD: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """As `cut`, of `size` keys in registers; the others are LOWEST."""
    low = tl.min(tl.where(keys > LOWEST, keys, HIGHEST), 0).to(tl.int64)
    high = tl.max(keys, 0).to(tl.int64) + 1
    reaching = size.to(tl.int64)
    above = reaching * 0
    few = tl.reshape(keys, [HELD // 16, 16])
    while (reaching > enough) & (high - low > 1):
        # Sixteen are counted in half the bits first.
        packed = tl.sum(_reach(few, low, high, tl.int32, 10), 1).to(tl.int64)
        packed = tl.sum((packed & 0x3FF) | ((packed & 0xFFC00) << 11) | ((packed >> 20) << 42), 0)
        low, high, reaching, above = _quarter(packed, count, low, high, reaching, above)
    return low.to(tl.int32), (high - 1).to(tl.int32), above.to(tl.int32)


@triton.jit
def cut(
    source: tl.tensor,
    stop: tl.tensor,
    count: tl.tensor,
    enough: tl.tensor,
    FLOATS: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys `low <= last` and a number: at least `count` of the first `stop` reach `low`, `number` exceed `last`.

    The number is below `count`. Either `low` is `last`, or at most `enough` (at least `count`) reach `low`.
    """
    lane = tl.arange(0, TILE)
    smallest = tl.full([TILE], HIGHEST, tl.int32)
    largest = tl.full([TILE], LOWEST, tl.int32)
    for start in range(0, stop, TILE):
        keys = load_keys(source, start + lane, stop, FLOATS, VECTOR)
        largest = tl.maximum(largest, keys)
        smallest = tl.minimum(smallest, tl.where(start + lane < stop, keys, HIGHEST))
    low = tl.min(smallest, 0).to(tl.int64)
    high = tl.max(largest, 0).to(tl.int64) + 1
    reaching = stop.to(tl.int64)
    above = reaching * 0
    while (reaching > enough) & (high - low > 1):
        counts = tl.zeros([TILE], tl.int64)
        for start in range(0, stop, TILE):
            counts += _reach(load_keys(source, start + lane, stop, FLOATS, VECTOR), low, high, tl.int64, 21)
        packed = tl.sum(counts, 0)
        low, high, reaching, above = _quarter(packed, count, low, high, reaching, above)
    return low.to(tl.int32), (high - 1).to(tl.int32), above.to(tl.int32)
