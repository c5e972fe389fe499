"""Chunk keys on a GPU: one launch pools all chunks of all rows where their keys lie."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.types import KVView


@triton.jit(do_not_specialize=["k_scale_step", "chunks"])
def _pool(
    k: tl.tensor, page_table: tl.tensor, row_start: tl.tensor, edges: tl.tensor, k_scale: tl.tensor, pooled: tl.tensor,
    k_page_step: tl.tensor, k_slot_step: tl.tensor, k_head_step: tl.tensor, k_dim_step: tl.tensor,
    page_table_step: tl.tensor, k_scale_step: tl.tensor, kv_heads: tl.tensor, kv_page: tl.tensor,
    chunks: tl.tensor,
    SCALED: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    place = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    row = place // chunks
    begin = tl.load(edges + place + row)
    end = tl.load(edges + place + row + 1)
    first_slot = tl.load(row_start + row)
    pages = page_table + row * page_table_step
    dims = tl.arange(0, DIMS)
    k += head * k_head_step
    scale = 1.0
    if SCALED:
        scale = tl.load(k_scale + head * k_scale_step).to(tl.float32)
    held = tl.zeros((TOKENS, DIMS), tl.float32)
    for position in tl.range(begin, end, TOKENS, num_stages=3):
        positions = position + tl.arange(0, TOKENS)
        # What lies beyond the chunk is read as its last token.
        slots = first_slot + tl.minimum(positions, end - 1)
        stored = tl.load(pages + slots // kv_page).to(tl.int64)
        tokens = k + stored * k_page_step + (slots % kv_page).to(tl.int64) * k_slot_step
        keys = tl.load(
            tokens[:, None] + dims[None, :].to(tl.int64) * k_dim_step, mask=dims[None, :] < HEAD_DIM, other=0.0
        )
        held += tl.where((positions < end)[:, None], keys.to(tl.float32) * scale, 0.0)
    total = tl.sum(held, axis=0)
    mean = tl.div_rn(total, tl.zeros_like(total) + tl.maximum(end - begin, 1).to(tl.float32))
    target = pooled + ((row * kv_heads + head) * chunks + place % chunks) * HEAD_DIM + dims
    tl.store(target, mean, mask=dims < HEAD_DIM)


def pool(kv: KVView, edges: Tensor) -> Tensor:
    """Means of keys, float32 `[B, Hkv, C, d]`."""
    k, rows = kv.k, kv.rows
    batch, heads, head_dim, chunks = rows.batch, kv.kv_heads, kv.head_dim, edges.shape[1] - 1
    dims = max(triton.next_power_of_2(head_dim), 16)
    pooled = torch.empty((batch, heads, chunks, head_dim), dtype=torch.float32, device=k.device)
    page_table = rows.page_table if rows.page_table.stride(1) == 1 else rows.page_table.contiguous()
    places = edges.contiguous()
    scale = places if kv.k_scale is None else kv.k_scale.expand(heads)
    with torch.cuda.device_of(k):
        _pool[(batch * chunks * heads,)](
            k,
            page_table,
            rows.row_start.contiguous(),
            places,
            scale,
            pooled,
            *k.stride(),
            page_table.stride(0),
            scale.stride(0),
            heads,
            kv.page,
            chunks,
            SCALED=kv.k_scale is not None,
            HEAD_DIM=head_dim,
            DIMS=dims,
            TOKENS=max(2048 // dims, 1),
            num_warps=4,
        )
    return pooled
