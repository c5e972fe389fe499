"""Selectors that rank by attention mass: `TokenSelector` clusters single tokens, `ChunkSelector` chunks of text."""

from __future__ import annotations

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

_LABEL = 2


def _node(head_dim: int, itemsize: float) -> float:
    """A mean with its spread."""
    return head_dim * itemsize + SCORE_BYTES


class MassSelector(Selector):
    """Sinks, the tokens of the best sets, those that are in none yet, and the current one: always a whole budget."""

    __slots__ = ()
    budget: int
    owns_index = True

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        assert isinstance(index, MassLayer), "tokens are chosen through their own index"
        found = index.scores(q, kv, scale, each=self.heads == "query")
        return TopK(self.budget).choose(found, kv.rows, 1, scale)

    def size(self, length: int) -> int:
        return min(length, self.budget)


@dataclass(frozen=True)
class TokenSelector(TokenSettings, MassSelector):
    """Sets are clusters of tokens."""

    heads: HeadGrouping = "kv"

    def new_slots(self, sizes: SlotSizes) -> MassIndex:
        return MassIndex(self, sizes)

    @property
    def assumption(self) -> str | None:
        return f"the index is counted with clusters of {self.cluster_size} tokens and an empty buffer"

    def scores(self, length: int, group: int) -> Bytes:
        """Of clusters per query head, and of tokens per set."""
        sets = group if self.heads == "query" else 1
        stored = (length / self.cluster_size * group + length * sets) * SCORE_BYTES
        return Bytes(stored, stored)

    def search(self, length: int, head_dim: int, itemsize: float) -> Bytes:
        """Means with a spread and a size each, and every token's label."""
        cluster = _node(head_dim, itemsize) + INTEGER_BYTES
        return Bytes(read=length / self.cluster_size * cluster + length * _LABEL)

    def upkeep(self, length: int, appended: int, rewritten: int, head_dim: int, itemsize: float) -> Bytes:
        """Every second block of 1, 2, 4 ... buffers is planted before it becomes a larger one, and every group."""
        planted = appended * (1 + ((self.group // self.capacity).bit_length() - 1) / 2)
        cluster = (_node(head_dim, itemsize) + INTEGER_BYTES) / self.cluster_size
        return Bytes(planted * head_dim * itemsize, planted * (cluster + _LABEL))


@dataclass(frozen=True)
class ChunkSelector(ClusterSettings, MassSelector):
    """Sets are chunks."""

    @property
    def reads_text(self) -> bool:
        return self.chunking == "text"

    def new_slots(self, sizes: SlotSizes) -> MassIndex:
        return MassIndex(self, sizes if self.reads_text else replace(sizes, text=None))

    @property
    def assumption(self) -> str | None:
        return f"the index is counted with chunks of {self._chunk:g} tokens; the text decides about them"

    @property
    def _chunk(self) -> float:
        """Tokens of a chunk."""
        return ClusterTraffic(self, self.budget).chunk

    def scores(self, length: int, group: int) -> Bytes:
        """Of chunks per query head, and of tokens per set."""
        stored = (length / self._chunk * group + length) * SCORE_BYTES
        return Bytes(stored, stored)

    def search(self, length: int, head_dim: int, itemsize: float) -> Bytes:
        """Means with a spread and a size each, and every token's chunk."""
        chunk = _node(head_dim, itemsize) + INTEGER_BYTES
        return Bytes(read=length / self._chunk * chunk + length * INTEGER_BYTES)

    def upkeep(self, length: int, appended: int, rewritten: int, head_dim: int, itemsize: float) -> Bytes:
        """What a full buffer costs, shared: the last group's keys read and, half full, its means written."""
        half = self.replant / 2
        read, written = half * self._chunk * head_dim * itemsize, half * (_node(head_dim, itemsize) + INTEGER_BYTES)
        return Bytes(read, written).times(appended / self.capacity)
