"""Dense attention of the last tokens by torch's own attention: no key or value is repeated or copied.

On a GPU too, where Triton's kernel cannot take the call.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saccade.kernels._flat import host_bounds
from saccade.types import KVView, Softmax


def dense_pass(q: Tensor, kv: KVView, softmax: Softmax) -> Tensor:
    batch, heads, count, head_dim = q.shape
    # A group's heads are further queries of its KV head, where torch would repeat keys and values for each.
    folded = q.reshape(batch, kv.kv_heads, -1, head_dim)
    out = folded.new_empty((*folded.shape[:3], kv.v.shape[-1]))
    for row, (start, length) in enumerate(host_bounds(kv.rows)):
        page, here = int(kv.rows.page_table[row, 0]), slice(start, start + length)
        own = kv.k[None, page, here], kv.v[None, page, here]
        out[row] = _attend(folded[row : row + 1], *own, count, softmax.scale)[0]
    return out.view(batch, heads, count, -1).transpose(1, 2).contiguous()


def _attend(q: Tensor, keys: Tensor, values: Tensor, count: int, scale: float) -> Tensor:
    """Attention `[B, Hkv, g · n, d]` of the last n of the tokens `[B, N, Hkv, d]`, of which none is padding."""
    length, group = keys.shape[1], q.shape[2] // count
    own = torch.arange(length - count, length, device=q.device)[:, None]
    seen = (torch.arange(length, device=q.device) <= own).repeat(group, 1)
    out = scaled_dot_product_attention(
        q, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=seen[None, None], scale=scale
    )
    if count <= length:
        return out
    # Places before the row's first token see nothing.
    return torch.where((own >= 0).repeat(group, 1), out, 0.0)
