"""Raw scores in Triton: one pass over the keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._triton import plan
from saccade.kernels._triton.operands import LEAST_DIM, LEAST_TILE, head_factors, item_size, widened
from saccade.kernels._triton.paging import clamped_slots, only_page, storage_pages, storage_rows
from saccade.kernels._triton.scores import store_absent, store_scores
from saccade.kernels._triton.stream import load_query, load_tokens
from saccade.types import KVView, Pooling


def score(q: Tensor, kv: KVView, pooling: Pooling) -> Tensor:
    """Pooled scores of every token, float32 `[B, Hkv or Hq, max_len]`."""
    batch, query_heads, head_dim = q.shape
    rows, kv_heads = kv.rows, kv.kv_heads
    group = query_heads // kv_heads
    sets = query_heads if pooling == "each" else kv_heads
    scores = torch.empty((batch, sets, rows.max_len), dtype=torch.float32, device=q.device)
    inner = max(LEAST_DIM, triton.next_power_of_2(head_dim))
    tuning = plan.tuning(inner, item_size(q, kv.k))
    blocks = triton.cdiv(rows.max_len, tuning.block)
    (splits,) = plan.split_counts(((batch * kv_heads, blocks),), plan.processors(q.device) * tuning.resident)
    table = rows.page_table
    with torch.cuda.device_of(q):
        _score[(batch * kv_heads * splits,)](
            q, *q.stride(), kv.k, *kv.k.stride(), *head_factors(kv.k_scale, kv_heads),
            table, *table.stride(), rows.row_start, rows.row_start.stride(0), rows.seq_lens, rows.seq_lens.stride(0),
            scores, rows.max_len, batch, kv_heads, splits,
            GROUP=group, TILE=max(LEAST_TILE, triton.next_power_of_2(group)), DIM=head_dim, INNER=inner,
            PAGE=0 if table.shape[1] == 1 else kv.page, POOLING=pooling, WIDE=widened(q, kv.k),
            BLOCK=tuning.block, STAGES=tuning.stages, num_warps=tuning.warps, maxnreg=tuning.registers,
        )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=["max_len", "batch", "kv_heads", "splits"])
def _score(
    q: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, q_dim: tl.tensor, k: tl.tensor, k_page: tl.tensor,
    k_slot: tl.tensor, k_head: tl.tensor, k_dim: tl.tensor, k_scale: tl.tensor, k_scale_step: tl.tensor,
    table: tl.tensor, table_row: tl.tensor, table_step: tl.tensor, starts: tl.tensor, starts_step: tl.tensor,
    lengths: tl.tensor, lengths_step: tl.tensor, scores: tl.tensor, max_len: tl.tensor, batch: tl.tensor,
    kv_heads: tl.tensor, splits: tl.tensor,
    GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr, PAGE: tl.constexpr,
    POOLING: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Every `splits`-th block of one row's KV head."""
    program = tl.program_id(0)
    head = program % kv_heads
    program = program // kv_heads
    row = (program % batch).to(tl.int64)
    split = program // batch
    length = tl.load(lengths + row * lengths_step)
    start = tl.load(starts + row * starts_step)
    k_factor = 1.0
    if k_scale is not None:
        k_factor = tl.load(k_scale + head * k_scale_step).to(tl.float32)
    query = load_query(q + row * q_row + head * GROUP * q_head, q_head, q_dim, GROUP, TILE, DIM, INNER)
    if WIDE:
        query = query.to(tl.float32)
    sets: tl.constexpr = GROUP if POOLING == "each" else 1
    own_k = k + head.to(tl.int64) * k_head
    own_table = table + row * table_row
    own_scores = scores + (row * kv_heads + head) * sets * max_len

    tokens = split * BLOCK + tl.arange(0, BLOCK)
    own_k += only_page(own_table, k_page, PAGE)
    slots = clamped_slots(tokens, start, length)
    pages = storage_pages(own_table, table_step, slots, PAGE)
    for block in tl.range(split, tl.cdiv(length, BLOCK), splits, num_stages=STAGES):
        keys = load_tokens(own_k, storage_rows(pages, slots, k_page, k_slot, PAGE), k_dim, DIM, INNER)
        raw = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * k_factor
        store_scores(own_scores, raw, block, length, max_len, max_len, GROUP, TILE, POOLING, BLOCK)
        tokens += splits * BLOCK
        slots = clamped_slots(tokens, start, length)
        pages = storage_pages(own_table, table_step, slots, PAGE)
    store_absent(own_scores, split, splits, length, max_len, max_len, GROUP, TILE, POOLING, BLOCK)
