"""Exact top-k: every layer scores every token and attends to the best; what all other methods approximate."""

from ..selection.scorers.exact import ExactScorer
from ..selection.selector import ScoredSelector, pooling_of
from ._cut import CutOptions
from .method import Method, every_layer
from .options import FirstDense, Heads, RectifyField


class ExactTopKOptions(CutOptions):
    """Options of `exact_topk`: two dense layers, as the methods that it is the measure of."""

    heads: Heads = "kv"
    """one set per KV head (the best of its query heads counts), or one per query head"""
    dense_layers: FirstDense = None
    rectify: RectifyField = None

    @property
    def selector(self) -> ScoredSelector:
        return ScoredSelector(ExactScorer(pooling_of(self.heads)), self.cut, self.heads)


METHOD = Method(
    "exact_topk",
    "the best tokens by exact scores, in every layer: slow, the measure of the others",
    "-",
    ExactTopKOptions,
    every_layer,
    tuned=(),
)
