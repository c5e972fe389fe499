"""TidalDecode (Yang et al., 2024, arXiv 2410.05076): a few layers select tokens, the layers between reuse them."""

from __future__ import annotations

from typing import Any

from ..plans.plan import Plan, reselecting_roles
from ..selection.scorers.exact import ExactScorer
from ..selection.selector import ScoredSelector, pooling_of
from ..types import ModelShape
from ._cut import CutOptions
from .method import Method, reselecting
from .options import DenseLayers, Heads, RectifyField, Reselect


class TidalOptions(CutOptions):
    """Options of `tidal`: two dense layers, selection at layer 2 and in those of `reselect` (section 3.1)."""

    reselect: Reselect = None
    heads: Heads = "kv"
    """one set per KV head (the best of its query heads counts), or one per query head as published"""
    dense_layers: DenseLayers = 2
    rectify: RectifyField = None

    @property
    def selector(self) -> ScoredSelector:
        return ScoredSelector(ExactScorer(pooling_of(self.heads)), self.cut, self.heads)


def plan(options: Any, shape: ModelShape) -> Plan:
    """Publishing layers attend densely and choose; of options with a selector, `dense_layers` and `reselect`."""
    return Plan(options.selector, *reselecting_roles(shape, options.dense_layers, options.reselect))


METHOD = Method(
    "tidal",
    "a few layers select tokens by exact scores, the others reuse them",
    "TidalDecode, arXiv 2410.05076",
    TidalOptions,
    plan,
    usual=reselecting,
)
