"""Sparse decoding attention in plain torch: gathers the set, any layout, no host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._gather import gather_tokens_per_head
from saccade.types import KVView, Selection


def sparse_decode(q: Tensor, kv: KVView, selection: Selection, scale: float) -> Tensor:
    batch, query_heads, head_dim = q.shape
    heads = query_heads if selection.groups == query_heads else kv.kv_heads
    tokens, invalid = _tokens(selection, kv.rows.seq_lens)
    tokens = tokens.expand(batch, heads, -1)
    queries = q.float().reshape(batch, heads, query_heads // heads, head_dim)
    keys = gather_tokens_per_head(kv.k, kv.k_scale, kv.rows, tokens)
    scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(invalid[:, :, None], -torch.inf)
    values = gather_tokens_per_head(kv.v, kv.v_scale, kv.rows, tokens)
    return (torch.softmax(scores, dim=-1) @ values).reshape(q.shape).to(q.dtype)


def _tokens(selection: Selection, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Token positions `[B, G, M · unit]` and which of them to mask."""
    inside = torch.arange(selection.unit, device=selection.ids.device)
    tokens = (selection.ids[..., None].long() * selection.unit + inside).flatten(2)
    return tokens, (tokens < 0) | (tokens >= seq_lens[:, None, None])
