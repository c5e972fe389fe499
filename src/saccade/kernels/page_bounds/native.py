"""Page bounds in C, in either of its dtypes: recomputed where the keys lie, scored in one pass over both sides."""

import torch
from torch import Tensor

from saccade.kernels._native import library as native
from saccade.kernels._native.attention import FAILURES, ITEM_SIZE, cache_refusal, key_steps, readable, vectors_refusal
from saccade.kernels._stored_bounds import Stored
from saccade.types import KVView, Pooling


def update_refusal(stored: Stored, kv: KVView, start: Tensor) -> str | None:
    """Why the library cannot recompute these bounds, or None."""
    lower, upper, table = stored
    refusal = cache_refusal(kv, lower, upper, start, start if table is None else table)
    return _stride_refusal(lower, upper) if refusal is None else refusal


def update_page_bounds(stored: Stored, kv: KVView, page: int, start: Tensor, count: int, filled: bool) -> None:
    (lower, upper, table), k, rows = stored, kv.k, kv.rows
    blocks, _, block_pages, head_dim = lower.shape
    # These must live until the call returns: it holds addresses.
    pages, starts, lengths = rows.page_table.contiguous(), rows.row_start.contiguous(), rows.seq_lens.contiguous()
    changed, places = start.contiguous(), None if table is None else table.contiguous()
    size = ITEM_SIZE[k.dtype]
    call = native.Update.pack(
        *native.addresses(k, lower, upper, pages, starts, lengths, changed, places),
        *(*key_steps(kv), kv.tiled),
        *(step * size for bounds in (lower, upper) for step in bounds.stride()[:3]),
        *(rows.batch, kv.kv_heads, head_dim, size == 2),
        *(kv.page, k.shape[0], pages.shape[1]),
        *(blocks, block_pages, 0 if places is None else places.shape[1]),
        *(page, count, filled, torch.get_num_threads(), native.widest),
    )
    native.check("update_page_bounds", native.loaded().saccade_update_pages(call), FAILURES)


def refusal(q: Tensor, stored: Stored, seq_lens: Tensor) -> str | None:
    """Why the library cannot score these bounds, or None."""
    lower, upper, table = stored
    unfit = vectors_refusal("the bounds", lower, upper) or _stride_refusal(lower, upper)
    if unfit is not None:
        return unfit
    if q.shape[1] > native.MOST_GROUP * lower.shape[1]:
        return f"{q.shape[1]} query heads on {lower.shape[1]} KV heads are more than {native.MOST_GROUP} on each"
    for tensor in (q, lower, upper, seq_lens, lower if table is None else table):
        if not tensor.is_cpu:
            return f"the bounds are on {lower.device}, or an argument elsewhere than on the CPU"
    return None


def _stride_refusal(lower: Tensor, upper: Tensor) -> str | None:
    if lower.stride(3) != 1 or upper.stride(3) != 1:
        return f"the bounds have strides {lower.stride()} and {upper.stride()}, not 1 in the last place"
    return None


def page_scores(q: Tensor, stored: Stored, seq_lens: Tensor, page: int, pooling: Pooling, pages: int) -> Tensor:
    lower, upper, table = stored
    batch, query_heads, head_dim = q.shape
    blocks, kv_heads, block_pages, _ = lower.shape
    heads = query_heads if pooling == "each" else kv_heads
    scores = torch.empty(batch, heads, pages, dtype=torch.float32, device="cpu")
    # These must live until the call returns: it holds addresses.
    queries, lengths = readable(q), seq_lens.contiguous()
    places = None if table is None else table.contiguous()
    size = ITEM_SIZE[lower.dtype]
    call = native.Bounds.pack(
        *native.addresses(queries, lower, upper, lengths, places, scores),
        *(step * size for bounds in (lower, upper) for step in bounds.stride()[:3]),
        *(batch, query_heads, kv_heads, head_dim, size == 2, queries.dtype == torch.bfloat16),
        *(blocks, block_pages, 0 if places is None else places.shape[1]),
        *(pages, page, native.POOLING[pooling], torch.get_num_threads(), native.widest),
    )
    native.check("page_scores", native.loaded().saccade_page_scores(call), FAILURES)
    return scores
