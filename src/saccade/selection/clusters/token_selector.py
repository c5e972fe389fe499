"""`TokenSelector`: chooses tokens by the attention mass of the clusters that they are in."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...types import HeadGrouping, KVView, Selection
from ..costs import INTEGER_BYTES, SCORE_BYTES, Bytes
from ..index import Index, SlotSizes
from ..rules.top_k import TopK
from ..selector import Selector
from .mass_index import MassIndex, MassLayer
from .token_settings import TokenSettings

_LABEL = 2


@dataclass(frozen=True)
class TokenSelector(TokenSettings, Selector):
    """Sinks, the tokens of the best clusters, those that are in none yet, and the current one."""

    heads: HeadGrouping = "kv"

    owns_index = True

    def new_slots(self, sizes: SlotSizes) -> MassIndex:
        return MassIndex(self, sizes)

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        assert isinstance(index, MassLayer), "tokens are chosen through their own index"
        found = index.scores(q, kv, scale, each=self.heads == "query")
        return TopK(self.budget).choose(found, kv.rows, 1, scale)

    @property
    def assumption(self) -> str | None:
        return f"the index is counted with clusters of {self.cluster_size} tokens and half a buffer"

    def size(self, length: int) -> int:
        return min(length, self.budget)

    def scores(self, length: int, group: int) -> Bytes:
        """Of clusters per query head, and of tokens per set."""
        sets = group if self.heads == "query" else 1
        stored = (length / self.cluster_size * group + length * sets) * SCORE_BYTES
        return Bytes(stored, stored)

    def search(self, length: int, head_dim: int, itemsize: float) -> Bytes:
        """Means with a spread and a size each, and every token's label."""
        cluster = head_dim * itemsize + SCORE_BYTES + INTEGER_BYTES
        return Bytes(read=length / self.cluster_size * cluster + length * _LABEL)

    def upkeep(self, length: int, appended: int, rewritten: int, head_dim: int, itemsize: float) -> Bytes:
        """Per token the keys of the blocks that a full buffer completes, on average, and their clusters written."""
        # A buffer ends blocks of 1, 2, 4 ... buffers every 1st, 2nd, 4th ... time: as many tokens of each.
        blocks = (self.group // self.capacity).bit_length()
        vector = head_dim * itemsize
        cluster = vector + SCORE_BYTES + INTEGER_BYTES
        planted = appended * blocks
        return Bytes(planted * vector, planted * (cluster / self.cluster_size + _LABEL))
