"""The key that the best scores of a row reach, found by counting: each round quarters the range in which it lies.

A range is of keys without a sign, so that its size fits into as many bits.
"""

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
def _ranks_of(keys: tl.tensor) -> tl.tensor:
    """Keys without a sign, in the same order; 0 for LOWEST."""
    return (keys ^ LOWEST).to(tl.uint32, bitcast=True)


@triton.jit
def _keys_at(ranks: tl.tensor) -> tl.tensor:
    return ranks.to(tl.int32, bitcast=True) ^ LOWEST


@triton.jit
def _number_at(rank: tl.tensor) -> tl.tensor:
    key = _keys_at(rank)
    return tl.where(key < 0, key ^ HIGHEST, key).to(tl.float32, bitcast=True)


@triton.jit
def _by_key(low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Three bounds between quarters of a range: every range becomes smaller, of any numbers."""
    size = high - low
    return low + (size >> 2), low + (size >> 1), low + (size >> 1) + (size >> 2)


@triton.jit
def _by_value(low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The same of the numbers' range, half of whose keys lie near 0; where that is none, some of the range."""
    smallest = _number_at(low)
    step = (_number_at(high - 1) - smallest) * 0.25
    first = tl.minimum(tl.maximum(_ranks_of(keys_of(smallest + step)), low), high - 1)
    second = tl.minimum(tl.maximum(_ranks_of(keys_of(smallest + 2 * step)), first), high - 1)
    return first, second, tl.minimum(tl.maximum(_ranks_of(keys_of(smallest + 3 * step)), second), high - 1)


@triton.jit
def _reach(
    ranks: tl.tensor, first: tl.tensor, second: tl.tensor, third: tl.tensor, COUNTS: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:
    """1 for each of three bounds that a rank reaches, in BITS bits each."""
    counts = (ranks >= first).to(COUNTS)
    counts += (ranks >= second).to(COUNTS) << BITS
    return counts + ((ranks >= third).to(COUNTS) << (2 * BITS))


@triton.jit
def _quarter(
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    reaching: tl.tensor,
    above: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    reach_first: tl.tensor,
    reach_second: tl.tensor,
    reach_third: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The part of the range in which the `count`-th best lies, what reaches it and what lies above it."""
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
def _count_held(
    ranks: tl.tensor, first: tl.tensor, second: tl.tensor, third: tl.tensor, HELD: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """How many reach each of three bounds. Sums of 32 bits are one instruction of a warp, of 64 they are ten."""
    if HELD <= 512:
        packed = tl.sum(_reach(ranks, first, second, third, tl.int32, 10), 0)
        return packed & 0x3FF, (packed >> 10) & 0x3FF, packed >> 20
    else:
        few = tl.sum(_reach(tl.reshape(ranks, [HELD // 16, 16]), first, second, third, tl.int32, 10), 1)
        packed = tl.sum((few & 0x3FF) | ((few & 0xFFC00) << 5), 0)
        return packed & 0x7FFF, packed >> 15, tl.sum(few >> 20, 0)


@triton.jit
def cut_held(
    keys: tl.tensor, size: tl.tensor, count: tl.tensor, enough: tl.tensor, HELD: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """As `cut`, of `size` keys in registers, at most 16,384; the others are LOWEST."""
    ranks = _ranks_of(keys)
    low = _ranks_of(tl.min(tl.where(keys > LOWEST, keys, HIGHEST), 0))
    high = _ranks_of(tl.max(keys, 0)) + 1
    reaching = size
    above = size * 0
    if (reaching > enough) & (high - low > 1):
        first, second, third = _by_value(low, high)
        reach_first, reach_second, reach_third = _count_held(ranks, first, second, third, HELD)
        low, high, reaching, above = _quarter(
            count, low, high, reaching, above, first, second, third, reach_first, reach_second, reach_third
        )
    while (reaching > enough) & (high - low > 1):
        first, second, third = _by_key(low, high)
        reach_first, reach_second, reach_third = _count_held(ranks, first, second, third, HELD)
        low, high, reaching, above = _quarter(
            count, low, high, reaching, above, first, second, third, reach_first, reach_second, reach_third
        )
    return _keys_at(low), _keys_at(high - 1), above


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
    low = _ranks_of(tl.min(smallest, 0))
    high = _ranks_of(tl.max(largest, 0)) + 1
    reaching = stop
    above = stop * 0
    while (reaching > enough) & (high - low > 1):
        counts = tl.zeros([TILE], tl.int64)
        first, second, third = _by_key(low, high)
        for start in range(0, stop, TILE):
            ranks = _ranks_of(load_keys(source, start + lane, stop, FLOATS, VECTOR))
            counts += _reach(ranks, first, second, third, tl.int64, 21)
        packed = tl.sum(counts, 0)
        reach_first, reach_second = (packed & 0x1FFFFF).to(tl.int32), ((packed >> 21) & 0x1FFFFF).to(tl.int32)
        low, high, reaching, above = _quarter(
            count, low, high, reaching, above, first, second, third, reach_first, reach_second,
            (packed >> 42).to(tl.int32),
        )  # fmt: skip
    return _keys_at(low), _keys_at(high - 1), above
