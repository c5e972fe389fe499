"""Dense decoding attention on CPU for what the C library does not take: row by row, head by head, two products each."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._flat import RowReader, host_bounds
from saccade.kernels._gather import grouped
from saccade.kernels._softmax import capped, weights_of
from saccade.types import KVView, Pooling, Softmax

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
    for row, (start, length) in enumerate(host_bounds(kv.rows)):
        keys = RowReader(kv.k, kv.rows, row, start, length)
        for head in range(kv.kv_heads):
            for first in range(0, length, _BLOCK):
                last = min(first + _BLOCK, length)
                torch.mm(
                    queries[row, head], keys.read(head, first, last).float().t(), out=raw[row, head, :, first:last]
                )
    return raw


def _mix(weights: Tensor, kv: KVView) -> Tensor:
    """Outputs `[B, Hkv, g, d]` from weights `[B, Hkv, g, max_len]`."""
    out = weights.new_zeros((*weights.shape[:3], kv.head_dim))
    for row, (start, length) in enumerate(host_bounds(kv.rows)):
        values = RowReader(kv.v, kv.rows, row, start, length)
        for head in range(kv.kv_heads):
            for first in range(0, length, _BLOCK):
                last = min(first + _BLOCK, length)
                out[row, head].addmm_(weights[row, head, :, first:last], values.read(head, first, last).float())
    return out
