"""Dense attention of the last tokens by torch's own attention: no key or value is repeated or copied.

On a GPU too, where Triton's kernel cannot take the call.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saccade.kernels._flat import host_bounds
from saccade.types import KVView, Softmax


def dense_pass(q: Tensor, kv: KVView, softmax: Softmax) -> Tensor:
    batch, heads, count, head_dim = q.shape
    # A group's heads are further queries of its KV head, where torch would repeat keys and values for each.
    folded, group = q.reshape(batch, kv.kv_heads, -1, head_dim), heads // kv.kv_heads
    out = folded.new_empty((*folded.shape[:3], kv.v.shape[-1]))
    for row, (start, length) in enumerate(host_bounds(kv.rows)):
        page, here = int(kv.rows.page_table[row, 0]), slice(start, start + length)
        keys, values = (held[None, page, here].transpose(1, 2) for held in (kv.k, kv.v))
        own = torch.arange(length - count, length, device=q.device)[:, None]
        seen = (torch.arange(length, device=q.device) <= own).repeat(group, 1)[None, None]
        given = folded[row : row + 1], keys, values, seen
        # Places before the row's first token see nothing.
        there = (own >= 0).repeat(group, 1)
        out[row] = torch.where(there, scaled_dot_product_attention(*given, scale=softmax.scale), 0.0)[0]
    return out.view(batch, heads, count, -1).transpose(1, 2).contiguous()
