"""Dense decoding attention in plain torch: gathers the rows, any layout, no host synchronisation."""

import torch
from torch import Tensor

from saccade.kernels._gather import gather_tokens, grouped
from saccade.kernels._softmax import capped, weights_of
from saccade.types import KVView, Pooling, Softmax


def decode_scores(q: Tensor, kv: KVView, pooling: Pooling) -> Tensor:
    return _pooled(*_products(q, kv, _positions(kv)), pooling)


def dense_decode_scores(
    q: Tensor, kv: KVView, softmax: Softmax, pooling: Pooling | None
) -> tuple[Tensor, Tensor | None]:
    positions = _positions(kv)
    raw, queries, keys, absent = _products(q, kv, positions)
    logits = capped(raw * softmax.scale, softmax.cap).masked_fill(absent[:, None, None], -torch.inf)
    values = gather_tokens(kv.v, kv.v_scale, kv.rows, positions)
    out = torch.einsum("bhgn,bnhd->bhgd", weights_of(logits, softmax.sinks), values).flatten(1, 2).to(q.dtype)
    out = out.masked_fill((kv.rows.seq_lens == 0)[:, None, None], 0)
    return out, None if pooling is None else _pooled(raw, queries, keys, absent, pooling)


def _positions(kv: KVView) -> Tensor:
    return torch.arange(kv.rows.max_len, device=kv.k.device).expand(kv.rows.batch, -1)


def _products(q: Tensor, kv: KVView, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q·k `[B, Hkv, g, N]`, q and k themselves, grouped and gathered, and where a row has no token, bool `[B, N]`."""
    queries, keys = grouped(q, kv.kv_heads), gather_tokens(kv.k, kv.k_scale, kv.rows, positions)
    raw = torch.einsum("bhgd,bnhd->bhgn", queries, keys)
    return raw, queries, keys, positions >= kv.rows.seq_lens[:, None]


def _pooled(raw: Tensor, queries: Tensor, keys: Tensor, absent: Tensor, pooling: Pooling) -> Tensor:
    """Scores `[B, Hkv or Hq, N]` of what `_products` gives; -inf where there is no token."""
    if pooling == "max":
        scores = raw.amax(dim=2)
    elif pooling == "mean":
        scores = torch.einsum("bhd,bnhd->bhn", queries.mean(dim=2), keys)
    else:
        scores = raw.flatten(1, 2)
    return scores.masked_fill(absent[:, None], -torch.inf)
