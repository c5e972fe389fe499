"""LessIsMore (Yang et al., 2025, arXiv 2508.07101): TidalDecode's layers, one set for all heads, a recency window."""

from ..selection.rules import RankUnion
from ..selection.scorers.exact import ExactScorer
from ..selection.selector import ScoredSelector
from .method import RECTIFIED, Method, reselecting, some_layers
from .options import DEFAULT_BUDGET, Budget, DenseLayers, Options, Recent, RectifyField, Reselect, Sinks


class LessIsMoreOptions(Options):
    """Options of `less_is_more`: 4 sinks and a recency share of 0.25 (section 4.2 of the paper)."""

    budget: Budget = DEFAULT_BUDGET
    reselect: Reselect = None
    sinks: Sinks = 4
    recent: Recent = 0.25
    dense_layers: DenseLayers = 2
    rectify: RectifyField = None

    @property
    def selector(self) -> ScoredSelector:
        """Every query head's ranking merged rank by rank into one set."""
        rule = RankUnion(budget=self.budget, sinks=self.sinks, recent=self.recent)
        return ScoredSelector(ExactScorer("each"), rule, heads="all")


METHOD = Method(
    "less_is_more",
    "tidal's layers with one token set for all heads and a recent window",
    "LessIsMore, arXiv 2508.07101",
    LessIsMoreOptions,
    some_layers,
    usual=reselecting,
    tuned=({}, RECTIFIED),
)
