"""Dense decoding attention on CPU for what the C library does not take: row by row, head by head, two products each."""

from collections.abc import Callable

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

    def score(row: int, head: int, here: slice, keys: Tensor) -> None:
        torch.mm(queries[row, head], keys.t(), out=raw[row, head, :, here])

    _over_blocks(kv.k, kv.rows, score)
    return raw


def _mix(weights: Tensor, kv: KVView) -> Tensor:
    """Outputs `[B, Hkv, g, d]` from weights `[B, Hkv, g, max_len]`."""
    out = weights.new_zeros((*weights.shape[:3], kv.head_dim))

    def add(row: int, head: int, here: slice, values: Tensor) -> None:
        out[row, head].addmm_(weights[row, head, :, here], values)

    _over_blocks(kv.v, kv.rows, add)
    return out


def _over_blocks(storage: Tensor, rows: Rows, take: Callable[[int, int, slice, Tensor], None]) -> None:
    """Let `take` have row, KV head, logical positions and tokens `[n, d]` in float32: a view of one page, or gathered.

    One block after the other, so that the next lies where the last has lain, in the processor's cache.
    """
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
                    take(row, head, here, flat.table.index_select(0, places[here] + head * flat.head).float())
                else:
                    inside = slice(offset + here.start, offset + here.stop)
                    take(row, head, here, storage[int(rows.page_table[row, only]), inside, head].float())
