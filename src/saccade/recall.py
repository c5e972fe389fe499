"""Attention recall: the dense softmax mass that falls on the chosen set (LessIsMore, equation 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels.dense_decode_scores.api import decode_scores
from .roles import HeadSpan
from .types import KVView, Selection


class RecallObserver:
    """Sums attention recall per layer over heads, rows and steps; one extra pass over the keys per observed head."""

    def __init__(self, layers: int) -> None:
        self._sums = [0.0] * layers
        self._weights = [0.0] * layers

    def observe(
        self, layer: int, span: HeadSpan, q: Tensor, kv: KVView, selection: Selection | None, scale: float
    ) -> None:
        recall = 1.0 if selection is None else float(attention_recall(q, kv, selection, scale=scale).mean())
        weight = q.shape[0] * q.shape[1]
        self._sums[layer] += recall * weight
        self._weights[layer] += weight

    def per_layer(self) -> list[float | None]:
        """Mean recall of each layer; None where nothing was decoded."""
        pairs = zip(self._sums, self._weights, strict=True)
        return [total / weight if weight else None for total, weight in pairs]


def attention_recall(q: Tensor, kv: KVView, selection: Selection, *, scale: float) -> Tensor:
    """Dense softmax mass on the set of each query head.

    Args:
        q: `[B, Hq, d]`.
        kv: the cache whose last token per row is the query's own.
        selection: one set per row, KV head or query head.
        scale: factor on q·k before the softmax.

    Returns:
        float32 `[B, Hq]` in 0..1.
    """
    mass = (decode_scores(q, kv, pooling="each") * scale).softmax(-1)
    chosen = membership(selection, kv.rows.seq_lens, mass.shape[-1])
    per_group: Tensor = mass.unflatten(1, (selection.groups, -1))
    return (per_group * chosen[:, :, None]).sum(-1).flatten(1).clamp(max=1.0)


def membership(selection: Selection, seq_lens: Tensor, length: int) -> Tensor:
    """Which tokens a selection holds, bool `[B, G, length]` in logical order."""
    unit = selection.unit
    units = -(-length // unit)
    # One spare column takes the -1 padding.
    held = torch.zeros((*selection.ids.shape[:2], units + 1), dtype=torch.bool, device=selection.ids.device)
    held.scatter_(-1, torch.where(selection.ids < 0, units, selection.ids).long(), True)
    tokens = held[..., :units].repeat_interleave(unit, dim=-1)[..., :length]
    return tokens & (torch.arange(length, device=seq_lens.device) < seq_lens[:, None])[:, None]
