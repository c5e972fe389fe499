"""Sparse decoding attention on CPU: one index_select of flat rows each for keys and values, then two products."""

import torch
from torch import Tensor

from saccade.kernels._flat import FlatCache, flatten, host_bounds
from saccade.kernels._softmax import capped, weights_of
from saccade.types import KVView, Rows, Selection, Softmax


def sparse_decode(q: Tensor, kv: KVView, selection: Selection, softmax: Softmax) -> Tensor:
    batch, query_heads, head_dim = q.shape
    heads = query_heads if selection.groups == query_heads else kv.kv_heads
    tokens, invalid = _tokens(selection, kv.rows)
    width = tokens.shape[2]
    shape = (batch * heads, width, head_dim)
    flat_keys, flat_values = flatten(kv.k), flatten(kv.v)
    index = _flat_index(tokens, kv, flat_keys, heads)
    keys = flat_keys.table.index_select(0, index).view(shape).float()
    if flat_values[1:] != flat_keys[1:]:
        index = _flat_index(tokens, kv, flat_values, heads)
    values = flat_values.table.index_select(0, index).view(shape)
    queries = (q.float() * softmax.scale).reshape(batch * heads, -1, head_dim)
    scores = capped(torch.bmm(queries, keys.transpose(1, 2)), softmax.cap).view(batch, heads, -1, width)
    if invalid is not None:
        scores.masked_fill_(invalid[:, :, None], -torch.inf)
    return torch.bmm(weights_of(scores, softmax.sinks).flatten(0, 1), values.float()).view(q.shape).to(q.dtype)


def _tokens(selection: Selection, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Token positions `[B, G, width]`, all inside their rows, and which of them to mask (None when none)."""
    ids, unit = selection.ids, selection.unit
    counts = [count for row in selection.counts.tolist() for count in row]
    ids = ids[..., : max(counts)]
    if unit == 1:
        return (ids, None) if min(counts) == ids.shape[2] else (ids.clamp(min=0), ids < 0)
    tokens = (ids[..., None] * unit + torch.arange(unit, dtype=torch.int32, device="cpu")).flatten(2)
    last = rows.seq_lens[:, None, None] - 1
    return torch.minimum(tokens, last).clamp_(min=0), (tokens < 0) | (tokens > last)


def _flat_index(tokens: Tensor, kv: KVView, flat: FlatCache, heads: int) -> Tensor:
    """Flat rows of tokens `[B, G, width]` for each of `heads` heads, as one vector."""
    rows, page = kv.rows, kv.page
    group = heads // kv.kv_heads
    offsets = [head // group * flat.head for head in range(heads)]
    if rows.page_table.shape[1] == 1:
        bases = [
            [[number * flat.page + start * flat.slot + offset] for offset in offsets]
            for (start, _), (number,) in zip(host_bounds(rows), rows.page_table.tolist(), strict=True)
        ]
        slots = tokens if flat.slot == 1 else tokens * flat.slot
        return (slots + torch.tensor(bases, dtype=flat.index_dtype, device="cpu")).view(-1)
    slots = tokens + rows.row_start[:, None, None]
    pages = rows.page_table.to(flat.index_dtype).gather(1, (slots // page).flatten(1).long()).view(slots.shape)
    places = pages * flat.page + slots % page * flat.slot
    return (places + torch.tensor(offsets, dtype=flat.index_dtype, device="cpu")[:, None]).view(-1)
