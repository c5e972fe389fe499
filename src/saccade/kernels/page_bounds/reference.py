"""Page bounds in plain torch: fixed shapes, any layout, no host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._gather import gather_tokens
from saccade.types import KVView, Pooling


def update_page_bounds(lower: Tensor, upper: Tensor, kv: KVView, page: int, start: Tensor, count: int) -> None:
    batch, seq_lens = kv.rows.batch, kv.rows.seq_lens[:, None]
    device = kv.k.device
    begin = start[:, None].clamp(min=0)
    end = torch.minimum(start[:, None] + count, seq_lens)
    # As many pages as `count` tokens can touch at worst. A row that touches fewer repeats its last one, so that the
    # writes below need no host decision; a row that touches none writes back what it had.
    most = (count + page - 2) // page + 1
    pages = torch.minimum(begin // page + torch.arange(most, device=device), (end - 1).clamp(min=0) // page)
    # A page's positions beyond the row are read as its last token, which lies in the same page: no mask is needed.
    positions = (pages[..., None] * page + torch.arange(page, device=device)).flatten(1)
    keys = gather_tokens(kv.k, None, kv.rows, positions).view(batch, most, page, kv.kv_heads, kv.head_dim)
    touched = (end > begin)[..., None, None]
    row = torch.arange(batch, device=device)[:, None]
    for bounds, fresh in ((lower, keys.amin(dim=2)), (upper, keys.amax(dim=2))):
        by_page = bounds.transpose(1, 2)
        by_page[row, pages.long()] = torch.where(touched, fresh.to(bounds.dtype), by_page[row, pages.long()])


def page_scores(q: Tensor, lower: Tensor, upper: Tensor, seq_lens: Tensor, page: int, pooling: Pooling) -> Tensor:
    batch, query_heads, head_dim = q.shape
    kv_heads, pages = lower.shape[1], lower.shape[2]
    queries = q.float().reshape(batch, kv_heads, query_heads // kv_heads, head_dim)
    if pooling == "mean":
        queries = queries.mean(dim=2, keepdim=True)
    used = (seq_lens[:, None] + page - 1) // page
    absent = (torch.arange(pages, device=q.device) >= used)[:, None]
    scores = queries.clamp(min=0) @ _present(upper, absent) + queries.clamp(max=0) @ _present(lower, absent)
    pooled = scores.amax(dim=2) if pooling == "max" else scores.flatten(1, 2)
    return pooled.masked_fill(absent, -torch.inf)


def _present(bounds: Tensor, absent: Tensor) -> Tensor:
    """Bounds `[B, Hkv, d, P]` in float32 with zeros for pages that do not exist yet: their memory may hold NaN."""
    return bounds.float().masked_fill(absent[..., None], 0.0).transpose(-1, -2)
