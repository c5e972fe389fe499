"""Quest (Tang et al., 2024, arXiv 2406.10774): the pages whose key bounds promise the largest q·k, in every layer."""

from __future__ import annotations

from pydantic import model_validator

from ..selection.rules import TopK
from ..selection.scorers.page_bounds import PageBoundScorer
from ..selection.selector import ScoredSelector, pooling_of
from .method import RECTIFIED, Method, every_layer
from .options import DEFAULT_BUDGET, AtLeastOne, Budget, FirstDense, Heads, Options, Page, RectifyField


class QuestOptions(Options):
    """Options of `quest`: pages of 16 and two dense layers as in the paper."""

    budget: Budget = DEFAULT_BUDGET
    page: Page = 16
    min_pages: AtLeastOne = 1
    """fewest pages of a set, whatever the budget; 3 in the authors' accuracy code"""
    keep_last: bool = True
    """whether the current token's page is in every set; no in the authors' accuracy code, where it competes"""
    heads: Heads = "kv"
    """one set per KV head (the best of its query heads counts), or one per query head as published"""
    dense_layers: FirstDense = None
    rectify: RectifyField = None

    @property
    def selector(self) -> ScoredSelector:
        """Pages scored by sum_j max(q_j * min_j, q_j * max_j), the best budget // page of them."""
        scorer = PageBoundScorer(self.page, pooling_of(self.heads))
        return ScoredSelector(scorer, TopK(self.budget, self.min_pages, self.keep_last), self.heads)

    @model_validator(mode="after")
    def _holds_a_page(self) -> QuestOptions:
        if self.budget < self.page and self.min_pages == 1:
            raise ValueError(f"budget={self.budget} does not hold one page of {self.page}; the smallest is {self.page}")
        return self


METHOD = Method(
    "quest",
    "the best pages by key bounds, in every layer",
    "Quest, arXiv 2406.10774",
    QuestOptions,
    every_layer,
    tuned=({}, RECTIFIED),
)
