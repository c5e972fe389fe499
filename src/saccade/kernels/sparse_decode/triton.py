"""Attention over sets in Triton: gathers the set, split over programs."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels._triton.attention import attend
from saccade.types import KVView, Selection


def sparse_decode(q: Tensor, kv: KVView, selection: Selection, scale: float, out: Tensor | None) -> Tensor:
    return attend(q, kv, scale=scale, out=out, selection=selection)[0]
