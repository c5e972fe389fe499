"""Exact top-k: every layer scores every token and attends to the best; what all other methods approximate."""

from __future__ import annotations

from ..plans.plan import Plan, dense_unless_told, layer_roles
from ..selection.scorers.exact import ExactScorer
from ..selection.selector import ScoredSelector, pooling_of
from ..types import ModelShape
from ._cut import CutOptions
from .method import Method
from .options import FirstDense, Heads, RectifyField


class ExactTopKOptions(CutOptions):
    """Options of `exact_topk`: two dense layers, as the methods that it is the measure of."""

    heads: Heads = "kv"
    """one set per KV head (the best of its query heads counts), or one per query head"""
    dense_layers: FirstDense = None
    rectify: RectifyField = None


def plan(options: ExactTopKOptions, shape: ModelShape) -> Plan:
    """Each layer after the dense ones keeps the top `budget` tokens by q·k, the current one among them."""
    selector = ScoredSelector(ExactScorer(pooling_of(options.heads)), options.cut, options.heads)
    return Plan(selector, layer_roles(shape, dense_unless_told(shape, options.dense_layers)))


METHOD = Method(
    "exact_topk",
    "the best tokens by exact scores, in every layer: slow, the measure of the others",
    "-",
    ExactTopKOptions,
    plan,
    tuned=(),
)
