"""Dense attention of the last tokens in plain torch: gathers the rows, any layout, no host synchronisation."""

import torch
from torch import Tensor

from saccade.kernels._gather import gather_tokens
from saccade.kernels._softmax import capped, weights_of
from saccade.types import KVView, Softmax


def dense_pass(q: Tensor, kv: KVView, softmax: Softmax) -> Tensor:
    batch, heads, count, head_dim = q.shape
    group, device = heads // kv.kv_heads, q.device
    # Models in float64 exist to be compared with.
    dtype = torch.promote_types(q.dtype, torch.float32)
    positions = torch.arange(kv.rows.max_len, device=device).expand(batch, -1)
    keys = gather_tokens(kv.k, kv.k_scale, kv.rows, positions, dtype)
    values = gather_tokens(kv.v, kv.v_scale, kv.rows, positions, dtype)
    # A group's heads at all n places are further queries of its KV head.
    queries = q.to(dtype).reshape(batch, kv.kv_heads, group * count, head_dim)
    own = kv.rows.seq_lens[:, None] - count + torch.arange(count, device=device)
    hidden = (positions[:, None] > own[..., None])[:, None, None].expand(-1, kv.kv_heads, group, -1, -1)
    raw = torch.einsum("bhrd,bnhd->bhrn", queries, keys)
    logits = capped(raw * softmax.scale, softmax.cap).masked_fill(hidden.flatten(2, 3), -torch.inf)
    sinks = None if softmax.sinks is None else softmax.sinks.repeat_interleave(count)
    # A place before the row's first token sees nothing: its softmax is of no numbers.
    out = torch.einsum("bhrn,bnhd->bhrd", weights_of(logits, sinks).nan_to_num(0.0), values)
    return out.view(batch, heads, count, -1).transpose(1, 2).contiguous().to(q.dtype)
