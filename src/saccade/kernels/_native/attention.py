"""Tensors to the C library and back: what the attention operations share."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.kernels._native import library as native
from saccade.types import Flags, KVView, Pooling, Selection, Softmax

ITEM_SIZE = {torch.float32: 4, torch.bfloat16: 2}
FAILURES = {
    1: "a row does not lie within its pages",
    2: "a row's page lies outside the storage",
    3: "a row is longer than max_len",
    4: "the shapes do not fit",
    5: "out of memory",
}


@dataclass(frozen=True, slots=True)
class Heads:
    """What the KV heads of one call do, as the library reads it.

    Attributes:
        dense: bytes `[Hkv]`: attends to all tokens, not to its set.
        kept: int32 `[Hkv]`: place among the heads whose scores are wanted, -1 for the others.
        kept_heads: how many of these there are.
    """

    dense: ctypes.Array[ctypes.c_uint8]
    kept: ctypes.Array[ctypes.c_int32]
    kept_heads: int

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(dense: Flags, scored: Flags) -> Heads:
        kept = [sum(scored[:head]) if flag else -1 for head, flag in enumerate(scored)]
        return Heads((ctypes.c_uint8 * len(dense))(*dense), (ctypes.c_int32 * len(kept))(*kept), sum(scored))


def vectors_refusal(what: str, one: Tensor, other: Tensor) -> str | None:
    """Why the library cannot compute with the vectors of these two, called `what`, or None."""
    if native.library() is None:
        return native.refusal()
    if one.dtype not in ITEM_SIZE or other.dtype != one.dtype:
        return f"{what} are {one.dtype} and {other.dtype}, not both float32 or bfloat16"
    head_dim = one.shape[-1]
    if head_dim % 16 or not 0 < head_dim <= native.MOST_DIM:
        return f"head dim {head_dim} is not a multiple of 16 up to {native.MOST_DIM}"
    return None


def cache_refusal(kv: KVView, *others: Tensor) -> str | None:
    """Why the library cannot read this cache, with these other arguments, or None."""
    k, v, rows = kv.k, kv.v, kv.rows
    unfit = vectors_refusal("k and v", k, v)
    if unfit is not None:
        return unfit
    if kv.k_scale is not None or kv.v_scale is not None:
        return "the cache is quantised"
    if kv.tiled and not native.reads_tiles(kv.head_dim):
        return "the cache lies in tiles, and this machine has no products of bfloat16 pairs"
    if v.stride(3) != 1 or (k.stride(3) != 1 and (k.stride(1) != 1 or kv.page < native.LEAST_PAGE)):
        return (
            f"k and v have strides {k.stride()} and {v.stride()}, not 1 in the last place, nor k in the second with "
            f"pages of at least {native.LEAST_PAGE} tokens"
        )
    for tensor in (k, v, rows.page_table, rows.row_start, rows.seq_lens, *others):
        if not tensor.is_cpu:
            return f"the cache is on {k.device}, or an argument elsewhere than on the CPU"
    if not rows.page_table.dtype == rows.row_start.dtype == rows.seq_lens.dtype == torch.int32:
        return "page table, row starts or lengths are not int32"
    return None


def native_refusal(q: Tensor, kv: KVView, selection: Selection | None = None) -> str | None:
    """Why the library cannot attend with this query, or None."""
    refusal = cache_refusal(kv, q, *(() if selection is None else (selection.ids, selection.counts)))
    if refusal is None and kv.tiled and q.dtype != torch.bfloat16:
        return f"the cache lies in tiles, and q is {q.dtype}"
    if refusal is None and q.shape[1] > native.MOST_GROUP * kv.kv_heads:
        return f"{q.shape[1]} query heads on {kv.kv_heads} KV heads are more than {native.MOST_GROUP} on each"
    return refusal


def key_steps(kv: KVView) -> tuple[int, int, int, int]:
    """Bytes between pages, slots, heads and a column's numbers; the last 0 where a key's numbers are neighbours."""
    page, slot, head, dim = (step * ITEM_SIZE[kv.k.dtype] for step in kv.k.stride())
    return page, slot, head, native.LINE if kv.tiled else 0 if kv.k.stride(3) == 1 else dim


def readable(q: Tensor) -> Tensor:
    """Queries as the library reads them: contiguous, float32 or bfloat16."""
    return (q if q.dtype in ITEM_SIZE else q.float()).contiguous()


def attention(
    operation: str,
    q: Tensor,
    kv: KVView,
    softmax: Softmax,
    *,
    pooling: Pooling | None = None,
    selection: Selection | None = None,
    heads: Heads | None = None,
    attends: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The output `[B, Hq, d]` in q's dtype, undefined unless it `attends`; and scores, float32 `[B, G, max_len]`.

    With a selection all heads attend to their sets, or those that `heads` does not call dense. Only after
    `native_refusal` has found nothing.
    """
    k, v, rows = kv.k, kv.v, kv.rows
    # These must live until the call returns: it holds addresses.
    queries = readable(q)
    out = torch.empty_like(queries)
    table, starts, lengths = rows.page_table.contiguous(), rows.row_start.contiguous(), rows.seq_lens.contiguous()
    ids = None if selection is None else selection.ids.contiguous()
    counts = None if selection is None else selection.counts.contiguous()
    sinks = None if softmax.sinks is None else softmax.sinks.float().contiguous()
    size = ITEM_SIZE[k.dtype]
    v_page, v_slot, v_head, _ = v.stride()
    batch, query_heads, dim = q.shape
    pages, page, kv_heads, _ = k.shape
    kept, scores = kv_heads if heads is None else heads.kept_heads, None
    if pooling is not None:
        groups = kept * (query_heads // kv_heads if pooling == "each" else 1)
        scores = torch.empty((batch, groups, rows.max_len), dtype=torch.float32, device="cpu")
    call = native.Call.pack(
        *native.addresses(queries, k, v, table, starts, lengths, ids, counts),
        *((0, 0) if heads is None else (ctypes.addressof(heads.dense), ctypes.addressof(heads.kept))),
        *native.addresses(out if attends else None, scores, sinks),
        *(softmax.scale, softmax.cap or 0.0),
        *(*key_steps(kv), v_page * size, v_slot * size, v_head * size, kv.tiled),
        *(batch, query_heads, kv_heads, dim, size == 2, queries.dtype == torch.bfloat16),
        *(page, pages, table.shape[1], rows.max_len),
        *((1, 0, 1) if ids is None or selection is None else (ids.shape[1], ids.shape[2], selection.unit)),
        *(kept, native.POOLING[pooling], torch.get_num_threads(), native.widest),
    )
    native.check(operation, native.loaded().saccade_attention(call), FAILURES)
    return out if out.dtype == q.dtype else out.to(q.dtype), scores
