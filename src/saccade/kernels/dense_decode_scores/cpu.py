"""Dense decoding attention on CPU: two passes over the key axis with the small score matrix kept in between."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._dot import KEY_BLOCK, score_keys, weigh_values
from saccade.kernels._flat import RowReader, host_bounds
from saccade.types import KVView, Pooling


def decode_scores(q: Tensor, kv: KVView, pooling: Pooling) -> Tensor:
    queries = _grouped(q, kv.kv_heads)
    if pooling == "mean":
        queries = queries.mean(dim=2, keepdim=True)
    raw = _raw_scores(queries, kv)
    return raw.amax(dim=2) if pooling == "max" else raw.flatten(1, 2)


def dense_decode_scores(
    q: Tensor, kv: KVView, scale: float, pooling: Pooling | None
) -> tuple[Tensor, Tensor | None]:
    queries = _grouped(q, kv.kv_heads)
    group = queries.shape[2]
    if pooling == "mean":
        # One more row of the same product costs nothing next to reading the keys.
        queries = torch.cat((queries, queries.mean(dim=2, keepdim=True)), dim=2)
    raw = _raw_scores(queries, kv)
    scores: Tensor | None = None
    if pooling == "max":
        scores = raw.amax(dim=2)
    elif pooling == "mean":
        scores = raw[:, :, group].contiguous()
    elif pooling == "each":
        scores = raw.flatten(1, 2)
    out = torch.empty_like(queries[:, :, :group])
    for row, (start, length) in enumerate(host_bounds(kv.rows)):
        values = RowReader(kv.v, kv.rows, row, start, length)
        weights = torch.softmax(raw[row, :, :group, :length] * scale, dim=-1)
        for head in range(kv.kv_heads):
            out[row, head] = weigh_values(weights[head], values.read(head, 0, length))
    return out.reshape(q.shape).to(q.dtype), scores


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    batch, heads, head_dim = q.shape
    return q.float().reshape(batch, kv_heads, heads // kv_heads, head_dim)


def _raw_scores(queries: Tensor, kv: KVView) -> Tensor:
    """Scores `[B, Hkv, r, max_len]` of queries `[B, Hkv, r, d]`."""
    raw = queries.new_empty((*queries.shape[:3], kv.rows.max_len))
    scratch = queries.new_empty((min(KEY_BLOCK, kv.rows.max_len), kv.head_dim))
    for row, (start, length) in enumerate(host_bounds(kv.rows)):
        raw[row, :, :, length:] = -torch.inf
        keys = RowReader(kv.k, kv.rows, row, start, length)
        for head in range(kv.kv_heads):
            for first in range(0, length, KEY_BLOCK):
                last = min(first + KEY_BLOCK, length)
                score_keys(queries[row, head], keys.read(head, first, last), scratch, raw[row, head, :, first:last])
    return raw
