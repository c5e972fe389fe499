"""Hybrid attention in Triton: parts of dense and of sparse heads are one pool of programs of about equal length."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels._triton.attention import attend
from saccade.types import Flags, KVView, Pooling, Selection, Softmax


def hybrid_decode(
    q: Tensor,
    kv: KVView,
    selection: Selection,
    dense: Flags,
    softmax: Softmax,
    pooling: Pooling | None,
    scored: Flags,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    return attend(q, kv, softmax, out=out, selection=selection, dense=dense, pooling=pooling, scored=scored)
