"""Dense attention of the last tokens in Triton: tiles of queries over splits of the row, joined by another launch."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._triton import plan
from saccade.kernels._triton.combine import combine
from saccade.kernels._triton.heads import as_bits
from saccade.kernels._triton.operands import LEAST_DIM, LEAST_TILE, head_factors, item_size, widened
from saccade.kernels._triton.paging import clamped_slots, only_page, storage_pages, storage_rows
from saccade.kernels._triton.stream import load_tokens
from saccade.types import KVView, Softmax


def tuning(queries: int, head_dim: int, size: int) -> tuple[int, plan.Tuning]:
    """Queries of a program and its other sizes; of those tried on an H200 the fastest (`benchmarks.gpu.passes`).

    For so many queries of a KV head, a head dim that is a power of two, and numbers of `size` bytes.
    """
    tile = max(LEAST_TILE, triton.next_power_of_2(queries))
    if size == 4:  # whose products are not the tensor cores': what is held must fit the registers
        return min(32, tile), plan.Tuning(max(16, min(64, 2048 // head_dim)), warps=4, stages=2, resident=2)
    return min(64, tile), plan.Tuning(max(16, min(64, 8192 // head_dim)), warps=4, stages=3, resident=2)


def dense_pass(q: Tensor, kv: KVView, softmax: Softmax) -> Tensor:
    batch, query_heads, count, head_dim = q.shape
    rows, group, table = kv.rows, query_heads // kv.kv_heads, kv.rows.page_table
    inner = max(LEAST_DIM, triton.next_power_of_2(head_dim))
    tile, chosen = tuning(group * count, inner, item_size(q[:, :, 0], kv.k, kv.v))
    tiles = triton.cdiv(group * count, tile)
    blocks = triton.cdiv(rows.max_len, chosen.block)
    streams = batch * kv.kv_heads * tiles
    (splits,) = plan.split_counts(((streams, blocks),), plan.processors(q.device) * chosen.resident)
    parts = torch.empty((batch * count, query_heads, splits, head_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((batch * count, query_heads, splits), dtype=torch.float32, device=q.device)
    out = torch.empty((batch, count, query_heads, head_dim), dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        # Programs of one part of a row stand together: what one has read of keys and values, the next finds near.
        _attend[(tiles, batch * kv.kv_heads, splits)](
            q, *q.stride(),
            kv.k, *kv.k.stride(), kv.v, *kv.v.stride(),
            *head_factors(kv.k_scale, kv.kv_heads), *head_factors(kv.v_scale, kv.kv_heads),
            softmax.scale * math.log2(math.e), (softmax.cap or 0.0) * math.log2(math.e),
            table, *table.stride(), rows.row_start, rows.row_start.stride(0), rows.seq_lens, rows.seq_lens.stride(0),
            parts, sums, count, kv.kv_heads, splits,
            GROUP=group, TILE=tile, DIM=head_dim, INNER=inner,
            PAGE=0 if table.shape[1] == 1 else kv.page,
            WIDE=widened(q, kv.k, kv.v), CAPPED=softmax.cap is not None, BLOCK=chosen.block, STAGES=chosen.stages,
            num_warps=chosen.warps,
        )  # fmt: skip
        everything = as_bits((True,) * kv.kv_heads)
        combine(parts, sums, softmax.sinks, out.view(-1, query_heads, head_dim), group, everything, (splits, 1))
    return out


@triton.jit
def _load(
    q: tl.tensor, head_step: tl.tensor, place_step: tl.tensor, dim_step: tl.tensor, queries: tl.tensor,
    count: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Queries of a KV head by number, `[n, INNER]`: the group's heads of a place are neighbours."""
    dims = tl.arange(0, INNER)
    offsets = queries % GROUP * head_step + queries // GROUP * place_step
    present = (queries < GROUP * count)[:, None] & (dims < DIM)[None, :]
    loaded = tl.load(q + offsets[:, None] + dims[None, :] * dim_step, mask=present, other=0.0)
    if WIDE:
        return loaded.to(tl.float32)
    else:
        return loaded


@triton.jit
def _read(
    storage: tl.tensor, page_step: tl.tensor, slot_step: tl.tensor, dim_step: tl.tensor, table: tl.tensor,
    table_step: tl.tensor, start: tl.tensor, length: tl.tensor, block: tl.tensor,
    DIM: tl.constexpr, INNER: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, ENDS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The tokens of a block, `[BLOCK, INNER]`; `ENDS`: the row may end among them, and 0 follows."""
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    if PAGE == 0:
        # One number of 64 bits for the block, and the same small ones in every block: a quarter of the loop otherwise.
        dims = tl.arange(0, INNER)
        own = storage + (start + block * BLOCK).to(tl.int64) * slot_step
        places = own + (tl.arange(0, BLOCK)[:, None] * slot_step + dims[None, :] * dim_step)
        if ENDS:
            return tl.load(places, mask=(tokens < length)[:, None] & (dims < DIM)[None, :], other=0.0)
        elif DIM == INNER:
            return tl.load(places)
        else:
            return tl.load(places, mask=(dims < DIM)[None, :], other=0.0)
    else:
        slots = clamped_slots(tokens, start, length)
        pages = storage_pages(table, table_step, slots, PAGE)
        return load_tokens(storage, storage_rows(pages, slots, page_step, slot_step, PAGE), dim_step, DIM, INNER)


@triton.jit
def _seen(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, tokens: tl.tensor, queries: tl.tensor, behind: tl.tensor,
    largest: tl.tensor, total: tl.tensor, weighted: tl.tensor, log2_scale: tl.tensor, log2_cap: tl.tensor,
    GROUP: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """One block of tokens more; `MASKED`: some lie behind a query's own place, counted from `behind` on."""
    logits = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if CAPPED:
        logits *= log2_scale
        shrunk = tl.exp2(tl.abs(logits) * (-2.8853900817779268 / log2_cap))
        capped = log2_cap * (1 - shrunk) / (1 + shrunk)
        logits = tl.where(logits < 0, -capped, capped)
        factor = 1.0
    else:
        # Multiplied where the largest is taken off, in one instruction: a scale above 0 keeps their order.
        factor = log2_scale
    if MASKED:
        own = behind + queries // GROUP
        logits = tl.where(tokens[None, :] <= own[:, None], logits, float("-inf"))
    # Not -inf, so that a query that has seen nothing yet has no weight that is no number.
    now = tl.maximum(largest, tl.max(logits, axis=1) * factor)
    shrink = tl.exp2(largest - now)
    weights = tl.exp2(logits * factor - now[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    weighted = tl.dot(weights.to(query.dtype), values, weighted * shrink[:, None], input_precision="ieee")
    return now, total, weighted


@triton.jit
def _store(
    parts: tl.tensor, sums: tl.tensor, queries: tl.tensor, first: tl.tensor, head: tl.tensor, kv_heads: tl.tensor,
    split: tl.tensor, splits: tl.tensor, count: tl.tensor, largest: tl.tensor, total: tl.tensor, weighted: tl.tensor,
    v_factor: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr,
) -> None:  # fmt: skip
    """A part of each query's attention, and the base 2 logarithm of the sum of its weights, -inf where there are none.

    `first`: the place of the row's first query among all rows' places.
    """
    dims = tl.arange(0, INNER)
    present = queries < GROUP * count
    number = (first + queries // GROUP) * (kv_heads * GROUP) + head * GROUP + queries % GROUP
    places = number * splits + split
    some = tl.maximum(total, 1e-30)
    values = weighted / some[:, None] * v_factor
    inside = present[:, None] & (dims < DIM)[None, :]
    tl.store(parts + places[:, None] * DIM + dims[None, :], values, mask=inside)
    tl.store(sums + places, tl.where(total > 0, largest + tl.log2(some), float("-inf")), mask=present)


@triton.jit(do_not_specialize=["count", "kv_heads", "splits"])
def _attend(
    q: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, q_place: tl.tensor, q_dim: tl.tensor,
    k: tl.tensor, k_page: tl.tensor, k_slot: tl.tensor, k_head: tl.tensor, k_dim: tl.tensor,
    v: tl.tensor, v_page: tl.tensor, v_slot: tl.tensor, v_head: tl.tensor, v_dim: tl.tensor,
    k_scale: tl.tensor, k_scale_step: tl.tensor, v_scale: tl.tensor, v_scale_step: tl.tensor,
    log2_scale: tl.tensor, log2_cap: tl.tensor,
    table: tl.tensor, table_row: tl.tensor, table_step: tl.tensor,
    starts: tl.tensor, starts_step: tl.tensor, lengths: tl.tensor, lengths_step: tl.tensor,
    parts: tl.tensor, sums: tl.tensor, count: tl.tensor, kv_heads: tl.tensor, splits: tl.tensor,
    GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr,
    PAGE: tl.constexpr, WIDE: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of a KV head's queries over one part of its row."""
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    split = tl.program_id(2)
    row, head = (pair // kv_heads).to(tl.int64), pair % kv_heads
    length = tl.load(lengths + row * lengths_step)
    start = tl.load(starts + row * starts_step)
    factor = log2_scale
    if k_scale is not None:
        factor *= tl.load(k_scale + head * k_scale_step).to(tl.float32)
    v_factor = 1.0
    if v_scale is not None:
        v_factor = tl.load(v_scale + head * v_scale_step).to(tl.float32)
    own_q = q + row * q_row + head.to(tl.int64) * GROUP * q_head
    queries = tile * TILE + tl.arange(0, TILE)
    query = _load(own_q, q_head, q_place, q_dim, queries, count, GROUP, DIM, INNER, WIDE)
    largest = tl.full((TILE,), -1e38, dtype=tl.float32)
    total = tl.zeros((TILE,), dtype=tl.float32)
    weighted = tl.zeros((TILE, INNER), dtype=tl.float32)

    own_table = table + row * table_row
    own_k = k + head.to(tl.int64) * k_head + only_page(own_table, k_page, PAGE)
    own_v = v + head.to(tl.int64) * v_head + only_page(own_table, v_page, PAGE)
    # Tokens that every query sees need no mask, and only the last few are others.
    common = tl.maximum(length - count + 1, 0) // BLOCK
    for part in tl.static_range(2):
        first = split if part == 0 else common + (split + splits - common % splits) % splits
        last = common if part == 0 else tl.cdiv(length, BLOCK)
        for block in tl.range(first, last, splits, num_stages=STAGES):
            tokens = block * BLOCK + tl.arange(0, BLOCK)
            keys = _read(
                own_k, k_page, k_slot, k_dim, own_table, table_step, start, length, block, DIM, INNER, PAGE, BLOCK,
                part == 1,
            ).to(query.dtype)  # fmt: skip
            values = _read(
                own_v, v_page, v_slot, v_dim, own_table, table_step, start, length, block, DIM, INNER, PAGE, BLOCK,
                part == 1,
            ).to(query.dtype)  # fmt: skip
            largest, total, weighted = _seen(
                query, keys, values, tokens, queries, length - count, largest, total, weighted, factor, log2_cap,
                GROUP, CAPPED, part == 1,
            )  # fmt: skip
    _store(
        parts, sums, queries, row * count, head, kv_heads, split, splits, count, largest, total, weighted, v_factor,
        GROUP, DIM, INNER,
    )  # fmt: skip
