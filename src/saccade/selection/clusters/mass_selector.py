"""Selectors that rank by attention mass: `TokenSelector` clusters single tokens, `ChunkSelector` chunks of text."""

from abc import abstractmethod
from dataclasses import dataclass, replace

from torch import Tensor

from ...types import HeadGrouping, KVView, Selection
from ..costs import INTEGER_BYTES, SCORE_BYTES, Bytes
from ..index import Index, SlotSizes
from ..rules.top_k import TopK
from ..selector import Selector
from .mass_index import MassIndex, MassLayer
from .settings import ClusterSettings
from .token_settings import TokenSettings
from .traffic import ClusterTraffic


class MeansSelector(Selector):
    """Sinks, the tokens of the best sets, those that are in none yet, and the current one: always a whole budget.

    Attributes:
        per_set: tokens of a set, on average.
        label: bytes of what says which set a token is in.
    """

    __slots__ = ()
    budget: int
    sinks: int
    label: int
    owns_index = True

    @property
    @abstractmethod
    def per_set(self) -> float: ...

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        assert isinstance(index, MassLayer), "tokens are chosen through their own index"
        return TopK(self.budget).choose(index.scores(q, kv, scale, each=self.heads == "query"), kv.rows, 1, scale)

    @property
    def assumption(self) -> str | None:
        return f"the index is counted with sets of {self.per_set:g} tokens and an empty buffer"

    def size(self, length: int) -> int:
        return min(length, self.budget)

    def scores(self, length: int, group: int) -> Bytes:
        """Of sets per query head, and of tokens per choice."""
        stored = length * (group / self.per_set + (group if self.heads == "query" else 1)) * SCORE_BYTES
        return Bytes(stored, stored)

    def search(self, length: int, head_dim: int, itemsize: float) -> Bytes:
        """Means with a spread and a size each, and every token's label."""
        return Bytes(read=length * self._index(head_dim, itemsize))

    def _index(self, head_dim: int, itemsize: float) -> float:
        """Bytes for a token."""
        return (head_dim * itemsize + SCORE_BYTES + INTEGER_BYTES) / self.per_set + self.label

    def frame(self, length: int) -> tuple[int, int]:
        return self.sinks, 1


@dataclass(frozen=True)
class TokenSelector(TokenSettings, MeansSelector):
    """Sets are clusters of tokens."""

    heads: HeadGrouping = "kv"
    label = 2

    @property
    def per_set(self) -> float:
        return self.cluster_size

    def new_slots(self, sizes: SlotSizes) -> MassIndex:
        return MassIndex(self, sizes)

    def upkeep(self, length: int, appended: int, rewritten: int, head_dim: int, itemsize: float) -> Bytes:
        """Every second block of 1, 2, 4 ... buffers is planted before it becomes a larger one, and every group."""
        planted = appended * (1 + ((self.group // self.capacity).bit_length() - 1) / 2)
        return Bytes(planted * head_dim * itemsize, planted * self._index(head_dim, itemsize))


@dataclass(frozen=True)
class ChunkSelector(ClusterSettings, MeansSelector):
    """Sets are chunks."""

    label = 4

    @property
    def per_set(self) -> float:
        return ClusterTraffic(self, self.budget).chunk

    def new_slots(self, sizes: SlotSizes) -> MassIndex:
        return MassIndex(self, sizes if self.reads_text else replace(sizes, text=None))

    def upkeep(self, length: int, appended: int, rewritten: int, head_dim: int, itemsize: float) -> Bytes:
        """What a full buffer costs, shared: the last group's keys read and, half full, its means written."""
        tokens = self.replant / 2 * self.per_set * appended / self.capacity
        return Bytes(tokens * head_dim * itemsize, tokens * self._index(head_dim, itemsize))
