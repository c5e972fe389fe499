"""Sets of KV heads as bits of a 64-bit number: no memory to read, and no copy to the device."""

import triton
import triton.language as tl


def as_bits(flags: tuple[bool, ...]) -> int:
    """Bit `h` is flag `h`; a signed number, as kernels take it."""
    bits = sum(1 << head for head, flag in enumerate(flags) if flag)
    return bits - (1 << 64) if bits >> 63 else bits


@triton.jit
def unpacked(bits: tl.tensor) -> tl.tensor:
    """int32 `[64]` of 0 and 1."""
    heads = tl.arange(0, 64).to(tl.int64)
    return ((bits >> heads) & 1).to(tl.int32)


@triton.jit
def head_at(flags: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """The head that has `rank` flagged ones before it."""
    numbers = tl.arange(0, 64)
    return tl.sum(tl.where((tl.cumsum(flags, axis=0) == rank + 1) & (flags == 1), numbers, 0), axis=0)


@triton.jit
def rank_of(flags: tl.tensor, head: tl.tensor) -> tl.tensor:
    """How many flagged heads come before this one."""
    return tl.sum(tl.where(tl.arange(0, 64) < head, flags, 0), axis=0)


@triton.jit
def is_flagged(flags: tl.tensor, head: tl.tensor) -> tl.tensor:
    return tl.sum(tl.where(tl.arange(0, 64) == head, flags, 0), axis=0) == 1
