"""`ChunkSelector`: chooses chunks of text by Quest's bounds (the pilot study of LycheeCluster, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...types import KVView, Selection
from ..history import TokenHistory
from ..selector import INTEGER_BYTES, SCORE_BYTES, Bytes, Index, Selector
from .bounds import ChunkBounds, ChunkSettings


@dataclass(frozen=True)
class ChunkSelector(ChunkSettings, Selector):
    """The chunks whose key bounds promise the largest q·k, what is in no chunk yet, and the current token."""

    owns_index = True
    reads_text = True

    def new_index(self, kv: KVView, history: TokenHistory) -> ChunkBounds:
        return ChunkBounds.empty(self, history.chunks(self.cuts, kv, text=True), history, kv)

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        assert isinstance(index, ChunkBounds), "chunks are scored from their own index"
        return index.search(q, kv)

    @property
    def assumption(self) -> str | None:
        return f"bounds are counted for chunks of {self._chunk:g} tokens, which fill the budget; the text decides"

    def size(self, length: int) -> int:
        return min(length, self.budget)

    def scores(self, length: int, group: int) -> Bytes:
        stored = self._chunks(length) * (group if self.pooling == "each" else 1) * SCORE_BYTES
        return Bytes(stored, stored)

    def search(self, length: int, head_dim: int, itemsize: float) -> Bytes:
        """Both bounds of every chunk; two edges of those that are taken."""
        taken = max(self.budget - self.longest / 2 - 1, 0) / self._chunk
        return Bytes(read=2 * self._chunks(length) * head_dim * itemsize + 2 * taken * INTEGER_BYTES)

    def upkeep(self, length: int, appended: int, rewritten: int, head_dim: int, itemsize: float) -> Bytes:
        """Every key is read once and two bounds of each chunk written; rewritten tokens are in no chunk yet."""
        return Bytes(appended * head_dim * itemsize, appended / self._chunk * (2 * head_dim * itemsize + INTEGER_BYTES))

    @property
    def _chunk(self) -> float:
        """Tokens of a chunk: the mean of the shortest and the longest."""
        return (self.shortest + self.longest) / 2

    def _chunks(self, length: int) -> float:
        """Chunks of a row in mid-course, half of the longest chunk in none."""
        return max(length - 1 - self.longest / 2, 0) / self._chunk
