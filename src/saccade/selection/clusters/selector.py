"""`ClusterSelector`: chooses chunks of text through a two-level index (LycheeCluster, section 4)."""

from dataclasses import dataclass, replace

from torch import Tensor

from ...types import KVView, Selection
from ..costs import Bytes
from ..index import Index, SlotSizes
from ..selector import Selector
from .index import ClusterIndex, ClusterLayer
from .settings import ClusterSettings
from .traffic import ClusterTraffic


@dataclass(frozen=True)
class ClusterSelector(ClusterSettings, Selector):
    """Sinks, the best chunks by upper bounds on q·k, what is in no chunk yet, and the current token, per KV head."""

    owns_index = True

    def new_slots(self, sizes: SlotSizes) -> ClusterIndex:
        return ClusterIndex(self, sizes if self.reads_text else replace(sizes, text=None))

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        assert isinstance(index, ClusterLayer), "chunks are chosen through their own index"
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
