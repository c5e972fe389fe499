"""Sparse decoding attention in C: the chosen rows are fetched ahead and read where they lie, none is copied."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels._native.attention import attention
from saccade.types import KVView, Selection


def sparse_decode(q: Tensor, kv: KVView, selection: Selection, scale: float) -> Tensor:
    return attention("sparse_decode", q, kv, scale=scale, selection=selection)
