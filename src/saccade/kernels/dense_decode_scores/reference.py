"""Dense decoding attention in plain torch: gathers the rows, any layout, no host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._gather import gather_tokens, grouped
from saccade.kernels._softmax import capped, weights_of
from saccade.types import KVView, Pooling, Softmax


def decode_scores(q: Tensor, kv: KVView, pooling: Pooling) -> Tensor:
    positions = _positions(kv)
    keys = gather_tokens(kv.k, kv.k_scale, kv.rows, positions)
    queries = grouped(q, kv.kv_heads)
    raw = torch.einsum("bhgd,bnhd->bhgn", queries, keys)
    return _hide_absent(_pool(raw, queries, keys, pooling), kv, positions)


def dense_decode_scores(
    q: Tensor, kv: KVView, softmax: Softmax, pooling: Pooling | None
) -> tuple[Tensor, Tensor | None]:
    positions = _positions(kv)
    keys = gather_tokens(kv.k, kv.k_scale, kv.rows, positions)
    queries = grouped(q, kv.kv_heads)
    raw = torch.einsum("bhgd,bnhd->bhgn", queries, keys)
    absent = positions >= kv.rows.seq_lens[:, None]
    logits = capped(raw * softmax.scale, softmax.cap).masked_fill(absent[:, None, None], -torch.inf)
    values = gather_tokens(kv.v, kv.v_scale, kv.rows, positions)
    out = torch.einsum("bhgn,bnhd->bhgd", weights_of(logits, softmax.sinks), values).flatten(1, 2).to(q.dtype)
    out = out.masked_fill((kv.rows.seq_lens == 0)[:, None, None], 0)
    if pooling is None:
        return out, None
    return out, _hide_absent(_pool(raw, queries, keys, pooling), kv, positions)


def _positions(kv: KVView) -> Tensor:
    return torch.arange(kv.rows.max_len, device=kv.k.device).expand(kv.rows.batch, -1)


def _pool(raw: Tensor, queries: Tensor, keys: Tensor, pooling: Pooling) -> Tensor:
    if pooling == "max":
        return raw.amax(dim=2)
    if pooling == "mean":
        return torch.einsum("bhd,bnhd->bhn", queries.mean(dim=2), keys)
    return raw.flatten(1, 2)


def _hide_absent(scores: Tensor, kv: KVView, positions: Tensor) -> Tensor:
    absent = positions >= kv.rows.seq_lens[:, None]
    return scores.masked_fill(absent[:, None], -torch.inf)
