"""Sparse decoding attention in C: the chosen rows are fetched ahead and read where they lie, none is copied."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels._native.attention import attention
from saccade.types import KVView, Selection, Softmax


def sparse_decode(q: Tensor, kv: KVView, selection: Selection, softmax: Softmax) -> Tensor:
    return attention("sparse_decode", q, kv, softmax, selection=selection)[0]
