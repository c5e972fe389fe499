"""The cheap stand-in for a search: how well each layer's set would serve the layers above it, from one dense pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from ..decode.recall import dense_weights, mass, membership
from ..kernels.dense_decode_scores.api import decode_scores
from ..plans.plan import Plan
from .asking import AnswerObserver, AnswerStep, Sheet

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]


class ProxyObserver(AnswerObserver):
    """Lets every layer choose its set and holds it against all layers above; scores are dropped layer by layer.

    Args:
        plans: what chooses, one per budget; only their selectors are used.
        layers: of the model; those without full attention have zeros.

    Attributes:
        mass: attention mass of layer `m` on the set that layer `r` chose, summed over answer tokens, rows and heads;
            float64 `[budgets, r, m]`, zero for r >= m.
        overlap: share of layer m's own set that is in layer r's, summed in the same way.
        weights: what to divide both by, `[L]`.
    """

    def __init__(self, plans: Sequence[Plan], layers: int) -> None:
        selectors = [plan.selector for plan in plans]
        assert all(selectors), "a plan without a selector has no sets to compare"
        self._selectors = [selector for selector in selectors if selector is not None]
        self.mass = torch.zeros(len(plans), layers, layers, dtype=torch.float64, device="cpu")
        self.overlap = torch.zeros_like(self.mass)
        self.weights = torch.zeros(layers, dtype=torch.float64, device="cpu")
        self._sets: dict[int, dict[int, list[Tensor]]] = {}

    def turn_to(self, sheet: Sheet) -> None:
        super().turn_to(sheet)
        self._sets = {}  # those of the batch before

    def see(self, step: AnswerStep) -> None:
        seen = torch.tensor(step.rows, device=step.q.device)
        scores = decode_scores(step.q, step.kv, pooling="each")
        weights = dense_weights(scores, step.softmax)[seen]
        below = self._sets.setdefault(step.position, {})
        own = []
        for place, selector in enumerate(self._selectors):
            pooling = selector.fused_pooling
            stored = scores if pooling == "each" else scores.unflatten(1, (step.kv.kv_heads, -1)).amax(2)
            selection = selector.select(step.q, step.kv, None, stored, step.softmax.scale)
            held = membership(selection, step.kv.rows.seq_lens, weights.shape[-1])[seen]
            own.append(held)
            for lower, sets in below.items():
                self.mass[place, lower, step.layer] += float(mass(weights, sets[place]).double().sum())
                shared = (held & sets[place]).sum(-1) / held.sum(-1).clamp(min=1)
                self.overlap[place, lower, step.layer] += float(shared.mean(-1).double().sum()) * weights.shape[1]
        below[step.layer] = own
        self.weights[step.layer] += weights.shape[0] * weights.shape[1]


def predicted(values: Array, weights: Array, first: int, reselect: Sequence[int]) -> list[float] | None:
    """Mean over layers of `mass` or `overlap` by `weights`, budget by budget, if layers `first` and `reselect` choose.

    Only of layers with a set: those up to `first`, those that choose and those without full attention, which have no
    weight, have none. None if no layer has one.
    """
    source, found = first, list[Array]()
    for layer in range(first + 1, len(weights)):
        if layer in reselect:
            source = layer
        elif weights[layer]:
            found.append(values[:, source, layer] / weights[layer])
    means: list[float] | None = numpy.mean(found, axis=0).tolist() if found else None
    return means
