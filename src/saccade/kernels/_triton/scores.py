"""Storing raw scores, pooled over the query heads of a KV head, for kernels."""

import triton
import triton.language as tl


@triton.jit
def store_scores(
    scores: tl.tensor,
    raw: tl.tensor,
    block: tl.tensor,
    length: tl.tensor,
    max_len: tl.tensor,
    stored: tl.tensor,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    POOLING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store a block's scores at their positions; -inf at and after the row's length.

    Args:
        scores: of the KV head's first set, float32 `[max_len]`, for "each" `[GROUP, max_len]`.
        stored: where to stop: `max_len`, or 0 for a head whose scores nobody wants.
        raw: q·k, float32 `[TILE, BLOCK]`, of which the first `GROUP` rows count.
    """
    places = block * BLOCK + tl.arange(0, BLOCK)
    heads = tl.arange(0, TILE)
    present = places < length
    if POOLING == "each":
        hidden = tl.where(present[None, :], raw, float("-inf"))
        target = scores + heads[:, None].to(tl.int64) * max_len + places[None, :]
        tl.store(target, hidden, mask=(heads < GROUP)[:, None] & (places < stored)[None, :])
    else:
        if POOLING == "max":
            pooled = tl.max(tl.where((heads < GROUP)[:, None], raw, float("-inf")), axis=0)
        else:
            # The mean query's score is the mean of the scores; the rows that pad the group are 0.
            pooled = tl.sum(raw, axis=0) / GROUP
        tl.store(scores + places, tl.where(present, pooled, float("-inf")), mask=places < stored)


@triton.jit
def store_absent(
    scores: tl.tensor,
    split: tl.tensor,
    splits: tl.tensor,
    length: tl.tensor,
    max_len: tl.tensor,
    stored: tl.tensor,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    POOLING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store -inf for the blocks of this split that no token lies in."""
    blocks = tl.cdiv(length, BLOCK)
    first = split + tl.cdiv(tl.maximum(blocks - split, 0), splits) * splits
    nothing = tl.full((TILE, BLOCK), float("-inf"), dtype=tl.float32)
    for block in range(first, tl.cdiv(stored, BLOCK), splits):
        store_scores(scores, nothing, block, length, max_len, stored, GROUP, TILE, POOLING, BLOCK)
