"""Joining the parts of a head's attention, in a fixed order."""

import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._triton.heads import is_flagged, unpacked

PART = 4096
"""Numbers of the partial results that a program joins."""
MOST_JOINED = 16
"""Parts that the last program of a head joins itself; it reads them all at once."""


def combine(
    parts: Tensor, sums: Tensor, sinks: Tensor | None, out: Tensor, group: int, dense: int, splits: tuple[int, int]
) -> None:
    """Fill `out` `[B, Hq, d]` from partial results.

    Args:
        parts: float32 `[B, Hq, S, d]`, attention over each part alone; undefined where it had no token.
        sums: float32 `[B, Hq, S]`, base 2 logarithms of the sums of its weights, -inf where it had no token.
        sinks: `[Hq]`, natural logarithms of further weights, of tokens without a value; or None.
        group: query heads per KV head.
        dense: bits of the KV heads that attend to all tokens.
        splits: parts of a dense and of another head, of which S is the larger number.
    """
    batch, heads, most, head_dim = parts.shape
    width = triton.next_power_of_2(most)
    columns = min(triton.next_power_of_2(head_dim), max(16, PART // width))
    _combine[(batch * heads, triton.cdiv(head_dim, columns))](
        parts, sums, sinks, out, *out.stride(), heads, group, dense, *splits, most,
        DIM=head_dim, COLUMNS=columns, WIDTH=width, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "group", "dense", "dense_splits", "sparse_splits", "most"])
def _combine(
    parts: tl.tensor, sums: tl.tensor, sinks: tl.tensor, out: tl.tensor, out_row: tl.tensor, out_head: tl.tensor,
    out_dim: tl.tensor, heads: tl.tensor, group: tl.tensor, dense: tl.tensor, dense_splits: tl.tensor,
    sparse_splits: tl.tensor, most: tl.tensor, DIM: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    pair = tl.program_id(0)
    row, head = pair // heads, pair % heads
    splits = tl.where(is_flagged(unpacked(dense), head // group), dense_splits, sparse_splits)
    part = tl.arange(0, WIDTH)
    dims = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = pair.to(tl.int64) * most
    logs = tl.load(sums + first + part, mask=part < splits, other=float("-inf"))
    inside = (part < splits)[:, None] & (dims < DIM)[None, :]
    values = tl.load(parts + (first + part)[:, None] * DIM + dims[None, :], mask=inside, other=0.0)
    # A row without tokens has no part with any, and its output is 0.
    largest = tl.maximum(tl.max(logs, axis=0), -1e38)
    weights = tl.exp2(logs - largest)
    total = tl.maximum(tl.sum(weights, axis=0), 1e-30)
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - largest)
    # A part without tokens has weight 0, but what lies there may be NaN.
    joined = tl.sum(tl.where((weights > 0)[:, None], values * weights[:, None], 0.0), axis=0) / total
    place = out + row.to(tl.int64) * out_row + head * out_head + dims * out_dim
    tl.store(place, joined.to(out.dtype.element_ty), mask=dims < DIM)


@triton.jit
def join(
    parts: tl.tensor,
    sums: tl.tensor,
    sinks: tl.tensor,
    places: tl.tensor,
    queries: tl.tensor,
    present: tl.tensor,
    splits: tl.tensor,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """What `combine` makes of the `splits` parts from `places` on, `[TILE, INNER]`, for the program that was last."""
    dims = tl.arange(0, INNER)
    largest = tl.full((TILE,), -1e38, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    weighted = tl.zeros((TILE, INNER), tl.float32)
    for part in tl.static_range(WIDTH):
        held = present & (queries * 0 + part < splits)
        logs = tl.load(sums + places + part, mask=held, other=float("-inf"))
        inside = held[:, None] & (dims < DIM)[None, :]
        values = tl.load(parts + (places + part)[:, None] * DIM + dims[None, :], mask=inside, other=0.0)
        before = largest
        largest = tl.maximum(before, logs)
        shrink = tl.exp2(before - largest)
        weights = tl.exp2(logs - largest)
        total = total * shrink + weights
        # A part without tokens has weight 0, but what lies there may be NaN.
        weighted = weighted * shrink[:, None] + tl.where((weights > 0)[:, None], values * weights[:, None], 0.0)
    total = tl.maximum(total, 1e-30)
    if sinks is not None:
        logits = tl.load(sinks + queries, mask=present, other=0.0).to(tl.float32)
        total += tl.exp2(logits * 1.4426950408889634 - largest)
    return weighted / total[:, None]
