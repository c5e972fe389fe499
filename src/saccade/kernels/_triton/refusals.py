"""Why the attention kernels cannot take a call; asked without importing Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._triton.availability import refusal
from saccade.types import KVView, Selection

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2)
MOST_HEADS = 64
MOST_GROUP = 32
MOST_DIM = 256
LEAST_CAPABILITY_FLOAT8 = (8, 9)


def attention_refusal(q: Tensor, kv: KVView, selection: Selection | None = None) -> str | None:
    """Why the Triton attention kernels cannot attend with this query, or None."""
    k, v, rows = kv.k, kv.v, kv.rows
    chosen = () if selection is None else (selection.ids, selection.counts)
    reason = refusal(q, k, v, rows.page_table, rows.row_start, rows.seq_lens, *chosen)
    if reason is not None:
        return reason
    if q.dtype not in FLOATS:
        return f"q is {q.dtype}"
    odd = next((part for part in (k, v) if part.dtype not in (*FLOATS, *QUANTISED)), None)
    if odd is not None:
        return f"the cache is {odd.dtype}"
    if torch.float8_e4m3fn in (k.dtype, v.dtype) and k.is_cuda:
        capability = torch.cuda.get_device_capability(k.device)
        if capability < LEAST_CAPABILITY_FLOAT8:
            return f"float8_e4m3fn needs compute capability 8.9, the device has {capability[0]}.{capability[1]}"
    if kv.head_dim > MOST_DIM:
        return f"head dim {kv.head_dim} is more than {MOST_DIM}"
    if kv.kv_heads > MOST_HEADS or q.shape[1] > MOST_GROUP * kv.kv_heads:
        return f"{q.shape[1]} query heads on {kv.kv_heads} KV heads: at most {MOST_GROUP} on each of {MOST_HEADS}"
    return None
