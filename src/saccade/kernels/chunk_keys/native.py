"""Chunk keys in C: every chunk's keys are read once, where they lie."""

import torch
from torch import Tensor

from saccade.kernels._native import library as native
from saccade.kernels._native.attention import FAILURES, ITEM_SIZE, key_steps
from saccade.types import KVView


def pool(kv: KVView, edges: Tensor) -> Tensor:
    """Means of keys, float32 `[B, Hkv, C, d]`; of edges that were checked."""
    k, rows = kv.k, kv.rows
    batch, heads, chunks, head_dim = rows.batch, kv.kv_heads, edges.shape[1] - 1, kv.head_dim
    pooled = torch.empty((batch, heads, chunks, head_dim), dtype=torch.float32, device="cpu")
    # These must live until the call returns: it holds addresses.
    table, starts, places = rows.page_table.contiguous(), rows.row_start.contiguous(), edges.contiguous()
    size = ITEM_SIZE[k.dtype]
    call = native.ChunkKeys.pack(
        *native.addresses(k, table, starts, places, pooled),
        *(*key_steps(kv)[:3], native.LINE if kv.tiled else k.stride(3) * size, kv.tiled),
        *(batch, heads, head_dim, size == 2),
        *(kv.page, k.shape[0], table.shape[1], chunks),
        torch.get_num_threads(),
    )
    native.check("chunk_keys", native.loaded().saccade_chunk_keys(call), FAILURES)
    return pooled
