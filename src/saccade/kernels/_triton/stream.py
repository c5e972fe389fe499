"""One query tile over a stream of tokens: the loop that reads keys and values, for kernels."""

import triton
import triton.language as tl

from saccade.kernels._triton.paging import (
    clamped_slots,
    listed_tokens,
    only_page,
    read_units,
    storage_pages,
    storage_rows,
)
from saccade.kernels._triton.scores import store_scores


@triton.jit
def load_query(
    q: tl.tensor,
    head_step: tl.tensor,
    dim_step: tl.tensor,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
) -> tl.tensor:
    """`GROUP` queries and rows of zeros below them, `[TILE, INNER]`."""
    heads = tl.arange(0, TILE)
    dims = tl.arange(0, INNER)
    return tl.load(
        q + heads[:, None] * head_step + dims[None, :] * dim_step,
        mask=(heads < GROUP)[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )


@triton.jit
def load_tokens(
    storage: tl.tensor, rows: tl.tensor, dim_step: tl.tensor, DIM: tl.constexpr, INNER: tl.constexpr
) -> tl.tensor:
    """`[BLOCK, INNER]`; 0 past the head dim."""
    dims = tl.arange(0, INNER)
    places = storage + rows[:, None] + dims[None, :] * dim_step
    if DIM == INNER:
        return tl.load(places)
    else:
        return tl.load(places, mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def stream(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, k_page: tl.tensor, k_slot: tl.tensor, k_dim: tl.tensor, v_page: tl.tensor,
    v_slot: tl.tensor, v_dim: tl.tensor, k_factor: tl.tensor, log2_scale: tl.tensor, log2_cap: tl.tensor,
    table: tl.tensor, table_step: tl.tensor, start: tl.tensor, length: tl.tensor, ids: tl.tensor, ids_step: tl.tensor,
    room: tl.tensor, everything: tl.tensor, limit: tl.tensor, split: tl.tensor, splits: tl.tensor, scores: tl.tensor,
    max_len: tl.tensor, stored: tl.tensor,
    CAPPED: tl.constexpr, LISTED: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    DIM: tl.constexpr, INNER: tl.constexpr, PAGE: tl.constexpr, POOLING: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Softmax attention of a tile of queries over every `splits`-th block of a stream, from block `split` on.

    Args:
        q: `[TILE, INNER]` in the dtype of the products.
        k, v: the KV head's first numbers.
        log2_cap: the soft-cap times log2(e), where logits are `CAPPED`.
        room: tokens that the set's buffer holds.
        everything: whether the stream is all tokens, though sets are `LISTED`: a choice among numbers, since a branch
            would wait for it before it reads anything else.
        limit: tokens of the stream: the row's length, or the size of its set.
        scores: where a stream of all tokens leaves its raw scores, if `POOLING` is not "", up to position `stored`.

    Returns:
        Per query the weighted sum of the values over the sum of the weights, and the base 2 logarithm of that sum
        (-inf where no token was read).
    """
    largest = tl.full((TILE,), -1e38, dtype=tl.float32)
    total = tl.zeros((TILE,), dtype=tl.float32)
    weighted = tl.zeros((TILE, INNER), dtype=tl.float32)
    # Slots and pages are known one iteration ahead and ids two, so that no key waits for an index read in the same
    # iteration. The compiler pipelines no loop that hands on a value unchanged: tokens are not carried, slots are.
    places = split * BLOCK + tl.arange(0, BLOCK)
    stride = splits * BLOCK
    tokens = places
    if LISTED:
        tokens = listed_tokens(read_units(ids, ids_step, places, room, UNIT), everything, places, limit, UNIT)
    places += stride
    if LISTED:
        units = read_units(ids, ids_step, places, room, UNIT)
    k += only_page(table, k_page, PAGE)
    v += only_page(table, v_page, PAGE)
    slots = clamped_slots(tokens, start, length)
    present = (tokens >= 0) & (tokens < length)
    pages = storage_pages(table, table_step, slots, PAGE)
    for block in tl.range(split, tl.cdiv(limit, BLOCK), splits, num_stages=STAGES):
        keys = load_tokens(k, storage_rows(pages, slots, k_page, k_slot, PAGE), k_dim, DIM, INNER)
        values = load_tokens(v, storage_rows(pages, slots, v_page, v_slot, PAGE), v_dim, DIM, INNER)
        raw = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee") * k_factor
        if POOLING != "":
            store_scores(scores, raw, block, length, max_len, stored, GROUP, TILE, POOLING, BLOCK)
        logits = raw * log2_scale
        if CAPPED:
            # tanh by the exponential of what is not above 0; in base 2, as the logits are.
            shrunk = tl.exp2(tl.abs(logits) * (-2.8853900817779268 / log2_cap))
            capped = log2_cap * (1 - shrunk) / (1 + shrunk)
            logits = tl.where(logits < 0, -capped, capped)
        logits = tl.where(present[None, :], logits, float("-inf"))
        before = largest
        largest = tl.maximum(before, tl.max(logits, axis=1))
        shrink = tl.exp2(before - largest)
        weights = tl.exp2(logits - largest[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        weighted = tl.dot(weights.to(q.dtype), values.to(q.dtype), weighted * shrink[:, None], input_precision="ieee")
        ahead = places
        if LISTED:
            ahead = listed_tokens(units, everything, places, limit, UNIT)
        places += stride
        if LISTED:
            units = read_units(ids, ids_step, places, room, UNIT)
        slots = clamped_slots(ahead, start, length)
        present = (ahead >= 0) & (ahead < length)
        pages = storage_pages(table, table_step, slots, PAGE)
    # Triton takes a constant below float32's normal numbers for a float64, and so all that it meets.
    summed = tl.where(total > 0, largest + tl.log2(tl.maximum(total, 1e-30)), float("-inf"))
    return weighted / tl.maximum(total, 1e-30)[:, None], summed
