"""ReSA (Sun et al., 2025, arXiv 2506.04108): pages by key bounds, a share of the row, dense rectification."""

from typing import Any

from ..plans.rectify import Rectify
from ..selection.rules import Ratio
from ..selection.scorers.page_bounds import PageBoundScorer
from ..selection.selector import ScoredSelector
from .method import Method, every_layer
from .options import AtLeastOne, DenseLayers, Options, Page, RectifyField, Share


class ReSAOptions(Options):
    """Options of `resa`: a tenth of the pages of 16, at least 16 pages, rectified every 32 steps (section 3.1)."""

    page: Page = 16
    ratio: Share = 0.1
    """share of the row's pages that is kept"""
    min_pages: AtLeastOne = 16
    """fewest pages that are kept (n_min, equation 4)"""
    local_pages: AtLeastOne = 1
    """last pages that are always kept, the current token's among them (n_local, section 2.1)"""
    dense_layers: DenseLayers = 0
    rectify: RectifyField = Rectify(32)

    def at_share(self, share: float) -> dict[str, Any]:
        return {} if "ratio" in self.model_fields_set else {"ratio": share, "min_pages": 1}

    @property
    def selector(self) -> ScoredSelector:
        """Pages scored by the group's mean query, n = max(min_pages, ceil(M * ratio)) of M (equations 3 and 4)."""
        rule = Ratio(self.ratio, minimum=self.min_pages, local=self.local_pages)
        return ScoredSelector(PageBoundScorer(self.page, "mean"), rule)


METHOD = Method(
    "resa",
    "a share of the pages by key bounds, with dense rectification",
    "ReSA, arXiv 2506.04108",
    ReSAOptions,
    every_layer,
)
