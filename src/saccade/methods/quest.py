"""Quest (Tang et al., 2024, arXiv 2406.10774): the pages whose key bounds promise the largest q·k, in every layer."""

from __future__ import annotations

from pydantic import model_validator

from ..plans.plan import Plan, select_everywhere
from ..selection.chunks.selector import ChunkSelector
from ..selection.rules import TopK
from ..selection.scorers.page_bounds import PageBoundScorer
from ..selection.selector import ScoredSelector, Selector, pooling_of
from ..types import ModelShape
from ._chunks import Chunking, LongestChunk, ShortestChunk, check_chunking
from .options import DEFAULT_BUDGET, Budget, DenseLayers, Heads, Options, Page, RectifyField


class QuestOptions(Options):
    """Options of `quest`: pages of 16 and two dense layers as in the paper."""

    budget: Budget = DEFAULT_BUDGET
    page: Page = 16
    heads: Heads = "kv"
    """one set per KV head (the best of its query heads counts), or one per query head as published"""
    dense_layers: DenseLayers = 2
    chunking: Chunking = "fixed"
    chunk_min: ShortestChunk = None
    chunk_max: LongestChunk = None
    rectify: RectifyField = None

    @property
    def selector(self) -> Selector:
        pooling = pooling_of(self.heads)
        if self.chunking == "fixed":
            return ScoredSelector(PageBoundScorer(page=self.page, pooling=pooling), TopK(self.budget), self.heads)
        every = 0 if self.rectify is None else self.rectify.every
        return ChunkSelector(self.budget, self.page, self.chunk_min, self.chunk_max, self.heads, pooling, every)

    @model_validator(mode="after")
    def _holds_a_page(self) -> QuestOptions:
        check_chunking(self.chunking, chunk_min=self.chunk_min, chunk_max=self.chunk_max)
        if self.chunking == "text":
            # The selector knows what fits its budget and says so.
            _ = self.selector
        elif self.budget < self.page:
            raise ValueError(f"budget={self.budget} does not hold one page of {self.page}; the smallest is {self.page}")
        return self


def plan(options: QuestOptions, shape: ModelShape) -> Plan:
    """Score pages by sum_j max(q_j * min_j, q_j * max_j), keep budget // page, the current token's page among them.

    Chunks of text: the best of them until the next does not fit, and the tokens that are in no chunk yet.
    """
    return Plan(options.selector, select_everywhere("quest", shape, options.dense_layers))
