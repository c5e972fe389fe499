"""`ClusterSelector`: chooses chunks of text through a two-level index (LycheeCluster, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...types import KVView, Selection
from ..history import TokenHistory
from ..selector import Bytes, Index, KeySizes, Selector
from .index import ClusterIndex
from .settings import ClusterSettings
from .stack import ClusterStack
from .traffic import ClusterTraffic


@dataclass(frozen=True)
class ClusterSelector(ClusterSettings, Selector):
    """Sinks, the best chunks by upper bounds on q·k, what is in no chunk yet, and the current token, per KV head."""

    owns_index = True
    stays = True

    @property
    def reads_text(self) -> bool:
        return self.chunking == "text"

    def new_index(self, kv: KVView, history: TokenHistory) -> Index:
        table = history.chunks(self.cuts, kv, text=self.reads_text)
        return ClusterIndex.empty(self, table, history, kv)

    def reserve(
        self, layers: Sequence[int], keys: KeySizes, rows: int, longest: int, history: TokenHistory
    ) -> ClusterStack:
        return ClusterStack.empty(self, layers, keys, rows, longest, history)

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        assert isinstance(index, ClusterIndex), "chunks are chosen through their own index"
        return index.search(q, kv)

    @property
    def assumption(self) -> str | None:
        chunk = ClusterTraffic(self, self.budget).chunk
        return (
            f"the index is counted with chunks of {chunk:g} tokens and units of equal size; the data decide about them"
        )

    def size(self, length: int) -> int:
        return min(length, self.budget)

    def scores(self, length: int, group: int) -> Bytes:
        return ClusterTraffic(self, length).bounds()

    def search(self, length: int, head_dim: int, itemsize: float) -> Bytes:
        return ClusterTraffic(self, length).search(head_dim, itemsize)

    def upkeep(self, length: int, appended: int, rewritten: int, head_dim: int, itemsize: float) -> Bytes:
        """Rewritten tokens are in no chunk yet, so that they are not in the index."""
        return ClusterTraffic(self, length).intake(head_dim, itemsize).times(appended / self.capacity)
