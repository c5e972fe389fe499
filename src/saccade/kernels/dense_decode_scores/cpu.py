"""Dense decoding attention on CPU for what the C library does not take: row by row, head by head, two products each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.kernels._flat import flatten, host_bounds
from saccade.kernels._gather import grouped
from saccade.kernels._softmax import capped, weights_of
from saccade.types import KVView, Pooling, Rows, Softmax

_BLOCK = 16384
"""Tokens whose numbers are widened at a time: all of 128K took 1.7 times as long (`docs/log.md`)."""


def decode_scores(q: Tensor, kv: KVView, pooling: Pooling) -> Tensor:
    queries = grouped(q, kv.kv_heads)
    if pooling == "mean":
        queries = queries.mean(dim=2, keepdim=True)
    raw = _raw_scores(queries, kv)
    return raw.amax(dim=2) if pooling == "max" else raw.flatten(1, 2)


def dense_decode_scores(
    q: Tensor, kv: KVView, softmax: Softmax, pooling: Pooling | None
) -> tuple[Tensor, Tensor | None]:
    queries = grouped(q, kv.kv_heads)
    group = queries.shape[2]
    if pooling == "mean":
        # One more row of the same product costs nothing next to reading the keys.
        queries = torch.cat((queries, queries.mean(dim=2, keepdim=True)), dim=2)
    raw = _raw_scores(queries, kv)
    scores: Tensor | None = None
    if pooling == "max":
        scores = raw.amax(dim=2)
    elif pooling == "mean":
        scores = raw[:, :, group].clone()
    elif pooling == "each":
        scores = raw.flatten(1, 2)
    weights = weights_of(capped(raw[:, :, :group] * softmax.scale, softmax.cap), softmax.sinks)
    return _mix(weights, kv).reshape(q.shape).to(q.dtype), scores


def _raw_scores(queries: Tensor, kv: KVView) -> Tensor:
    """Scores `[B, Hkv, r, max_len]` of queries `[B, Hkv, r, d]`."""
    raw = queries.new_full((*queries.shape[:3], kv.rows.max_len), -torch.inf)
    for row, head, here, keys in _blocks(kv.k, kv.rows):
        torch.mm(queries[row, head], keys.t(), out=raw[row, head, :, here])
    return raw


def _mix(weights: Tensor, kv: KVView) -> Tensor:
    """Outputs `[B, Hkv, g, d]` from weights `[B, Hkv, g, max_len]`."""
    out = weights.new_zeros((*weights.shape[:3], kv.head_dim))
    for row, head, here, values in _blocks(kv.v, kv.rows):
        out[row, head].addmm_(weights[row, head, :, here], values)
    return out


def _blocks(storage: Tensor, rows: Rows) -> Iterator[tuple[int, int, slice, Tensor]]:
    """Row, KV head, logical positions and tokens `[n, d]` in float32: views where a row has one page, else gathered."""
    page, flat = storage.shape[1], flatten(storage)
    for row, (start, length) in enumerate(host_bounds(rows)):
        only, offset = divmod(start, page)
        apart = offset + length > page
        if apart:
            slots = torch.arange(start, start + length, device="cpu")
            pages = rows.page_table[row].long().index_select(0, slots // page)
            places = pages * flat.page + slots % page * flat.slot
        for head in range(storage.shape[2]):
            for first in range(0, length, _BLOCK):
                here = slice(first, min(first + _BLOCK, length))
                if apart:
                    tokens = flat.table.index_select(0, places[here] + head * flat.head)
                else:
                    tokens = storage[int(rows.page_table[row, only]), offset + here.start : offset + here.stop, head]
                yield row, head, here, tokens.float()
