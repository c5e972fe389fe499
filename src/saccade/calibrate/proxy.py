"""The cheap stand-in for a search: how well each layer's set would serve the layers above it, from one dense pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.dense_decode_scores.api import decode_scores
from ..plans.plan import Plan
from .asking import AnswerObserver, AnswerStep, Sheet


class ProxyObserver(AnswerObserver):
    """Lets every layer choose its set and holds it against all layers above; scores are dropped layer by layer.

    Args:
        plans: what chooses, one per budget; only their selectors are used.
        layers: of the model.

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
        self.mass = torch.zeros(len(plans), layers, layers, dtype=torch.float64)
        self.overlap = torch.zeros_like(self.mass)
        self.weights = torch.zeros(layers, dtype=torch.float64)
        self._sheet: Sheet | None = None
        self._sets: dict[int, list[list[Tensor]]] = {}

    # Setting it begins a new batch, which ends what was kept of the one before.
    @property
    def sheet(self) -> Sheet:
        assert self._sheet is not None
        return self._sheet

    @sheet.setter
    def sheet(self, sheet: Sheet) -> None:
        self._sheet, self._sets = sheet, {}

    def see(self, step: AnswerStep) -> None:
        seen = torch.tensor(step.rows, device=step.q.device)
        scores = decode_scores(step.q, step.kv, pooling="each")
        weights = (scores * step.scale).softmax(-1)[seen]
        below = self._sets.setdefault(step.position, [])
        own = []
        for place, selector in enumerate(self._selectors):
            pooling = selector.fused_pooling
            stored = scores if pooling == "each" else scores.unflatten(1, (step.kv.kv_heads, -1)).amax(2)
            ids = selector.select(step.q, step.kv, None, stored, step.scale).ids[seen].long()
            own.append(ids)
            held = _held(ids, weights.shape[-1])
            for lower, sets in enumerate(below):
                self.mass[place, lower, step.layer] += _mass(weights, sets[place])
                self.overlap[place, lower, step.layer] += _shared(held, sets[place]) * weights.shape[1]
        below.append(own)
        self.weights[step.layer] += weights.shape[0] * weights.shape[1]

    def predicted(self, values: Tensor, first: int, reselect: Sequence[int]) -> list[float]:
        """Mean over layers of `mass` or `overlap`, budget by budget, if layers `first` and `reselect` choose.

        Layers up to `first` and those that choose attend to everything, which counts as 1.
        """
        choosing, source, totals = {first, *reselect}, first, torch.zeros(len(values), dtype=torch.float64)
        layers = len(self.weights)
        for layer in range(layers):
            if layer <= first or layer in choosing:
                source = max(layer, first)
                totals += 1
            else:
                totals += values[:, source, layer] / self.weights[layer]
        return (totals / layers).tolist()


def _held(ids: Tensor, length: int) -> Tensor:
    """Sets `[R, G, M]` of token ids, -1 behind the last, as bool `[R, G, length]`."""
    held = torch.zeros((*ids.shape[:2], length + 1), dtype=torch.bool, device=ids.device)
    held.scatter_(-1, torch.where(ids < 0, length, ids), True)
    return held[..., :length]


def _mass(weights: Tensor, ids: Tensor) -> float:
    """Sum over rows and query heads of the mass that lies on their group's set."""
    groups = ids.shape[1]
    grouped = weights.unflatten(1, (groups, -1))
    index = ids.clamp(min=0)[:, :, None].expand(-1, -1, grouped.shape[2], -1)
    on = grouped.gather(-1, index) * (ids >= 0)[:, :, None]
    return float(on.double().sum())


def _shared(held: Tensor, ids: Tensor) -> float:
    """Sum over rows of the mean share of the sets `held` that `ids` have as well."""
    common = (held.gather(-1, ids.clamp(min=0)) & (ids >= 0)).sum(-1)
    return float((common / held.sum(-1).clamp(min=1)).mean(-1).double().sum())
