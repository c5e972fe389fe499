"""Sparse decoding attention in C: the chosen rows are fetched ahead and read where they lie, none is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._native.attention import attention, number_dtype
from saccade.types import KVView, Selection


def sparse_decode(q: Tensor, kv: KVView, selection: Selection, scale: float) -> Tensor:
    out = torch.empty(q.shape, dtype=number_dtype(q))
    attention("sparse_decode", q, kv, out=out, scores=None, scale=scale, selection=selection)
    return out.to(q.dtype)
