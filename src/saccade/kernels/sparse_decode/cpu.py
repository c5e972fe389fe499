"""Sparse decoding attention on CPU: one index_select of flat rows each for keys and values, then two products."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._dot import HAS_BF16_DOT
from saccade.kernels._flat import FlatCache, flatten, host_bounds
from saccade.types import KVView, Rows, Selection

# oneDNN compiles a kernel per shape; sets are cut to multiples of this so that few shapes occur.
_STEP = 256


def sparse_decode(q: Tensor, kv: KVView, selection: Selection, scale: float) -> Tensor:
    batch, query_heads, head_dim = q.shape
    heads = query_heads if selection.groups == query_heads else kv.kv_heads
    tokens, invalid = _tokens(selection, kv.rows)
    width = tokens.shape[2]
    keys_at = flatten(kv.k)
    values_at = flatten(kv.v)
    index = _flat_index(tokens, kv, keys_at, heads)
    same = (keys_at.page, keys_at.slot, keys_at.head) == (values_at.page, values_at.slot, values_at.head)
    keys = keys_at.table.index_select(0, index).view(-1, width, head_dim).float()
    if not same:
        index = _flat_index(tokens, kv, values_at, heads)
    values = values_at.table.index_select(0, index).view(-1, width, head_dim)
    queries = q.float().mul_(scale) if q.dtype != torch.float32 else q * scale
    scores = torch.bmm(queries.reshape(batch * heads, -1, head_dim), keys.transpose(1, 2))
    if invalid is not None:
        scores.view(batch, heads, -1, width).masked_fill_(invalid[:, :, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if values.dtype == torch.bfloat16 and HAS_BF16_DOT and width % _STEP == 0:
        out = torch.bmm(weights.to(torch.bfloat16), values)
    else:
        out = torch.bmm(weights, values.float())
    return out.view(q.shape).to(q.dtype)


def _tokens(selection: Selection, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Token positions `[B, G, width]`, all inside their rows, and which of them to mask (None when none)."""
    ids, unit = selection.ids, selection.unit
    counts = [count for row in selection.counts.tolist() for count in row]
    fewest, most = min(counts), max(counts)
    ids = ids[..., : min(ids.shape[2], -(-most // _STEP) * _STEP)]
    if unit == 1:
        if fewest == ids.shape[2]:
            return ids, None
        return ids.clamp(min=0), ids < 0
    tokens = (ids[..., None] * unit + torch.arange(unit, dtype=torch.int32)).flatten(2)
    last = rows.seq_lens[:, None, None] - 1
    return torch.minimum(tokens, last).clamp_(min=0), (tokens < 0) | (tokens > last)


def _flat_index(tokens: Tensor, kv: KVView, flat: FlatCache, heads: int) -> Tensor:
    """Flat rows of tokens `[B, G, width]` for each of `heads` heads, as one vector."""
    rows, page = kv.rows, kv.page
    bounds = host_bounds(rows)
    head = torch.arange(heads) // (heads // kv.kv_heads) * flat.head
    if rows.page_table.shape[1] == 1:
        starts = [start * flat.slot + number * flat.page for (start, _), number in zip(bounds, rows.page_table[:, 0].tolist(), strict=True)]
        base = torch.tensor(starts)[:, None] + head
        index = (tokens if flat.slot == 1 else tokens.long() * flat.slot) + base[..., None]
    else:
        slots = tokens.long() + rows.row_start[:, None, None]
        pages = rows.page_table.long().gather(1, (slots // page).flatten(1)).view(slots.shape)
        index = pages * flat.page + slots % page * flat.slot + head[:, None]
    return index.view(-1)
