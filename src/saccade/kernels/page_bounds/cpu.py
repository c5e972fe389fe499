"""Page bounds on CPU: only the touched pages are read, and scoring is two products per head."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._flat import RowReader, host_bounds
from saccade.kernels._pooling import grouped
from saccade.kernels._stored_bounds import Stored
from saccade.types import KVView, Pooling

# Pages recomputed at a time: bounds the copy that a scattered cache needs.
_PAGES = 1024


def update_page_bounds(stored: Stored, kv: KVView, page: int, start: Tensor, count: int, filled: bool) -> None:
    lower, upper, table = stored
    for row, (begin, (row_start, length)) in enumerate(zip(start.tolist(), host_bounds(kv.rows), strict=True)):
        end = min(begin + count, length // page * page if filled else length)
        if end <= max(begin, 0):
            continue
        keys = RowReader(kv.k, kv.rows, row, row_start, length)
        last = (end - 1) // page
        for first in range(max(begin, 0) // page, last + 1, _PAGES):
            stop = min(first + _PAGES, last + 1)
            tokens = keys.read_heads(first * page, min(stop * page, length))
            if table is None:
                _reduce(tokens, page, lower[row, :, first:stop], upper[row, :, first:stop])
                continue
            fresh = tokens.new_empty((2, tokens.shape[0], stop - first, tokens.shape[2]))
            _reduce(tokens, page, fresh[0], fresh[1])
            block, inside = _places(lower, table[row], first, stop)
            for bounds, side in ((lower, fresh[0]), (upper, fresh[1])):
                bounds.transpose(1, 2)[block, inside] = side.transpose(0, 1)


def _places(bounds: Tensor, blocks: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
    """Block, and place in it, of a row's pages `first..stop`, by its `blocks` `[n]`."""
    pages = torch.arange(first, stop, device="cpu")
    return blocks.long()[pages // bounds.shape[2]], pages % bounds.shape[2]


def _reduce(tokens: Tensor, page: int, lower: Tensor, upper: Tensor) -> None:
    """Write the bounds `[Hkv, p, d]` of consecutive tokens `[Hkv, n, d]`; the last page may be partial."""
    whole = tokens.shape[1] // page
    if whole:
        full = tokens[:, : whole * page].unflatten(1, (whole, page))
        torch.amin(full, dim=2, out=lower[:, :whole])
        torch.amax(full, dim=2, out=upper[:, :whole])
    if whole < lower.shape[1]:
        torch.amin(tokens[:, whole * page :], dim=1, out=lower[:, whole])
        torch.amax(tokens[:, whole * page :], dim=1, out=upper[:, whole])


def page_scores(q: Tensor, stored: Stored, seq_lens: Tensor, page: int, pooling: Pooling, pages: int) -> Tensor:
    lower, upper, table = stored
    kv_heads = lower.shape[1]
    queries = grouped(q, kv_heads)
    if pooling == "mean":
        queries = queries.mean(dim=2, keepdim=True)
    positive, negative = queries.clamp(min=0), queries.clamp(max=0)
    scores = queries.new_empty((*queries.shape[:3], pages))
    for row, length in enumerate(seq_lens.tolist()):
        used = min(-(-length // page), pages)
        places = None if table is None else _places(lower, table[row], 0, used)
        for head in range(kv_heads):
            out = scores[row, head, :, :used]
            sides = [
                (bounds[row, head, :used] if places is None else bounds[:, head][places]).float().t()
                for bounds in (upper, lower)
            ]
            torch.mm(positive[row, head], sides[0], out=out)
            out.addmm_(negative[row, head], sides[1])
    return scores.amax(dim=2) if pooling == "max" else scores.flatten(1, 2)
