"""TidalDecode (Yang et al., 2024, arXiv 2410.05076): a few layers select tokens, the layers between reuse them."""

from ..selection.scorers.exact import ExactScorer
from ..selection.selector import ScoredSelector, pooling_of
from ._cut import CutOptions
from .method import Method, reselecting, some_layers
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


METHOD = Method(
    "tidal",
    "a few layers select tokens by exact scores, the others reuse them",
    "TidalDecode, arXiv 2410.05076",
    TidalOptions,
    some_layers,
    usual=reselecting,
)
