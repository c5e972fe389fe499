"""Attention over sets in Triton: gathers the set, split over programs."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels._triton.attention import attend
from saccade.types import KVView, Selection, Softmax, Workspace


def sparse_decode(
    q: Tensor, kv: KVView, selection: Selection, softmax: Softmax, out: Tensor | None, workspace: Workspace | None
) -> Tensor:
    return attend(q, kv, softmax, out=out, selection=selection, workspace=workspace)[0]
