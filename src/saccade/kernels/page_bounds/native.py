"""Page bounds in C: one pass over lower and upper bounds, in whatever of the two dtypes they are kept."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._native import library as native
from saccade.kernels._native.attention import ITEM_SIZE
from saccade.types import Pooling


def refusal(q: Tensor, lower: Tensor, upper: Tensor, seq_lens: Tensor) -> str | None:
    """Why the library cannot score these bounds, or None."""
    if native.library() is None:
        return "no library was built at install (a C compiler is needed)"
    if lower.dtype not in ITEM_SIZE or upper.dtype != lower.dtype:
        return f"the bounds are {lower.dtype} and {upper.dtype}, not both float32 or bfloat16"
    head_dim = lower.shape[3]
    if head_dim % 16 or not 0 < head_dim <= native.MOST_DIM:
        return f"head dim {head_dim} is not a multiple of 16 up to {native.MOST_DIM}"
    if lower.stride(3) != 1 or upper.stride(3) != 1:
        return f"the bounds have strides {lower.stride()} and {upper.stride()}, not 1 in the last place"
    if q.shape[1] > native.MOST_GROUP * lower.shape[1]:
        return f"{q.shape[1]} query heads on {lower.shape[1]} KV heads are more than {native.MOST_GROUP} on each"
    if not all(tensor.is_cpu for tensor in (q, lower, upper, seq_lens)):
        return f"the bounds are on {lower.device}, or an argument elsewhere than on the CPU"
    return None


def page_scores(q: Tensor, lower: Tensor, upper: Tensor, seq_lens: Tensor, page: int, pooling: Pooling) -> Tensor:
    batch, query_heads, head_dim = q.shape
    kv_heads, pages = lower.shape[1:3]
    scores = torch.empty((batch, query_heads if pooling == "each" else kv_heads, pages), dtype=torch.float32)
    # These must live until the call returns: it holds addresses.
    queries, lengths = q.float().contiguous(), seq_lens.contiguous()
    size = ITEM_SIZE[lower.dtype]
    call = native.Bounds(
        queries.data_ptr(),
        lower.data_ptr(),
        upper.data_ptr(),
        lengths.data_ptr(),
        scores.data_ptr(),
        *(step * size for bounds in (lower, upper) for step in bounds.stride()[:3]),
        *(batch, query_heads, kv_heads, head_dim, size == 2),
        *(pages, page, native.POOLING[pooling], torch.get_num_threads(), native.widest),
    )
    found = native.library()
    assert found is not None, "refusal was asked"
    failure = found.saccade_page_scores(ctypes.addressof(call))
    if failure:
        raise KernelError(f"page_scores: the library refused with {failure}")
    return scores
