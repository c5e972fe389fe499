"""Sparse decoding attention in plain torch: gathers the set, any layout, no host synchronisation."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.kernels._gather import gather_tokens_per_head
from saccade.kernels._softmax import capped, weights_of
from saccade.types import KVView, Rows, Selection, Softmax


def sparse_decode(q: Tensor, kv: KVView, selection: Selection, softmax: Softmax) -> Tensor:
    batch, query_heads, head_dim = q.shape
    heads = query_heads if selection.groups == query_heads else kv.kv_heads
    tokens, invalid = _tokens(selection, kv.rows)
    tokens, invalid = tokens.expand(batch, heads, -1), invalid.expand(batch, heads, -1)
    queries = q.float().reshape(batch, heads, query_heads // heads, head_dim)
    keys = gather_tokens_per_head(kv.k, kv.k_scale, kv.rows, tokens)
    logits = capped(queries @ keys.transpose(-1, -2) * softmax.scale, softmax.cap)
    scores = logits.masked_fill(invalid[:, :, None], -torch.inf)
    values = gather_tokens_per_head(kv.v, kv.v_scale, kv.rows, tokens)
    out = (weights_of(scores, softmax.sinks) @ values).flatten(1, 2).to(q.dtype)
    return out.masked_fill((kv.rows.seq_lens == 0)[:, None, None], 0)


def _tokens(selection: Selection, rows: Rows) -> tuple[Tensor, Tensor]:
    """Token positions `[B, G, N]` and which of them to mask."""
    inside = torch.arange(selection.unit, device=selection.ids.device)
    tokens = (selection.ids[..., None].long() * selection.unit + inside).flatten(2)
    if rows.whole is not None:
        tokens = pad(tokens, (0, max(rows.max_len - tokens.shape[2], 0)), value=-1)
        tokens = torch.where(rows.whole[:, None, None], torch.arange(tokens.shape[2], device=tokens.device), tokens)
    return tokens, (tokens < 0) | (tokens >= rows.seq_lens[:, None, None])
