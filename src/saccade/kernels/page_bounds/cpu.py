"""Page bounds on CPU: only the touched pages are read, and scoring is two products per head."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._flat import RowReader, host_bounds
from saccade.types import KVView, Pooling


def update_page_bounds(lower: Tensor, upper: Tensor, kv: KVView, page: int, start: Tensor, count: int) -> None:
    for row, (begin, (row_start, length)) in enumerate(zip(start.tolist(), host_bounds(kv.rows), strict=True)):
        end = min(begin + count, length)
        if end <= max(begin, 0):
            continue
        first, last = max(begin, 0) // page, (end - 1) // page
        keys = RowReader(kv.k, kv.rows, row, row_start, length)
        stop = min((last + 1) * page, length)
        whole = (stop - first * page) // page
        for head in range(kv.kv_heads):
            tokens = keys.read(head, first * page, stop)
            if whole:
                full = tokens[: whole * page].unflatten(0, (whole, page))
                torch.amin(full, dim=1, out=lower[row, head, first : first + whole])
                torch.amax(full, dim=1, out=upper[row, head, first : first + whole])
            if first + whole <= last:
                torch.amin(tokens[whole * page :], dim=0, out=lower[row, head, last])
                torch.amax(tokens[whole * page :], dim=0, out=upper[row, head, last])


def page_scores(
    q: Tensor, lower: Tensor, upper: Tensor, seq_lens: Tensor, page: int, pooling: Pooling
) -> Tensor:
    batch, query_heads, head_dim = q.shape
    kv_heads, pages = lower.shape[1], lower.shape[2]
    queries = q.float().reshape(batch, kv_heads, query_heads // kv_heads, head_dim)
    if pooling == "mean":
        queries = queries.mean(dim=2, keepdim=True)
    positive, negative = queries.clamp(min=0), queries.clamp(max=0)
    scores = queries.new_empty((*queries.shape[:3], pages))
    for row, length in enumerate(seq_lens.tolist()):
        used = -(-length // page)
        scores[row, :, :, used:] = -torch.inf
        for head in range(kv_heads):
            out = scores[row, head, :, :used]
            torch.mm(positive[row, head], upper[row, head, :used].float().t(), out=out)
            out.addmm_(negative[row, head], lower[row, head, :used].float().t())
    return scores.amax(dim=2) if pooling == "max" else scores.flatten(1, 2)
