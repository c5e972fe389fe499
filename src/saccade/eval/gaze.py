"""Where a policy looks: which parts of the document the attended sets touch, beside attention recall."""

from __future__ import annotations

import torch
from torch import Tensor

from ..decode.recall import membership
from ..decode.state import Observer
from ..plans.roles import HeadSpan
from ..types import KVView, Selection, Softmax

BINS = 160
"""Parts of equal length that a document is cut into."""


class GazeObserver:
    """Means over steps, sparse layers and heads: which bins of the document a set touches, whether it holds the fact.

    Args:
        length: tokens of the document; what is decoded behind it is not looked at.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._edges = torch.arange(length, device="cpu") * BINS // length
        self.look_for((0, 1))

    def look_for(self, value_span: tuple[int, int]) -> None:
        """Start anew, for a fact whose value lies at these tokens (first, and the one behind the last)."""
        self._span = value_span
        self._bins = torch.zeros(BINS, device="cpu")
        self._held = 0.0
        self._sets = 0

    def observe(
        self, layer: int, span: HeadSpan, q: Tensor, kv: KVView, selection: Selection | None, softmax: Softmax
    ) -> None:
        if selection is None:
            return
        heads = span.stop - span.start
        chosen = membership(selection, kv.rows.seq_lens, kv.rows.max_len)[0, :, : self._length].cpu()
        none = torch.zeros(chosen.shape[0], BINS, dtype=torch.int64, device="cpu")
        touched = none.index_add_(1, self._edges, chosen.long())
        self._bins += (touched > 0).float().mean(0) * heads
        self._held += float(chosen[:, slice(*self._span)].any(-1).float().mean()) * heads
        self._sets += heads

    @property
    def bins(self) -> list[float] | None:
        """Share 0..1 of sets that hold a token of each bin; None if every layer attended to everything."""
        return [round(share, 3) for share in (self._bins / self._sets).tolist()] if self._sets else None

    @property
    def fact_held(self) -> float | None:
        """Share 0..1 of sets that hold a token of the fact's value; None if every layer attended to everything."""
        return self._held / self._sets if self._sets else None


class Focus:
    """Passes on to other observers, which come and go; so that they see the tokens of one answer only."""

    def __init__(self) -> None:
        self.observers: tuple[Observer, ...] = ()

    def observe(
        self, layer: int, span: HeadSpan, q: Tensor, kv: KVView, selection: Selection | None, softmax: Softmax
    ) -> None:
        for observer in self.observers:
            observer.observe(layer, span, q, kv, selection, softmax)
