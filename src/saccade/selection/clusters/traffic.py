"""How much of a cluster index a search and the intake of new tokens move, in bytes per KV head."""

from __future__ import annotations

from dataclasses import dataclass

from ..selector import INTEGER_BYTES, SCORE_BYTES, Bytes
from .settings import ClusterSettings

_RADIUS = 4


@dataclass(frozen=True, slots=True)
class ClusterTraffic:
    """The index of a row of `length` tokens in mid-course: the buffer half full, chunks and units of equal size.

    Text decides about the true sizes; a chunk cut at delimiters counts as the mean of the shortest and the longest.
    """

    settings: ClusterSettings
    length: int

    @property
    def chunk(self) -> float:
        """Tokens of a chunk."""
        settings = self.settings
        return settings.chunk_max if settings.chunking == "fixed" else (settings.chunk_min + settings.chunk_max) / 2

    @property
    def chunks(self) -> float:
        """Chunks in the index."""
        indexed = self.length - 1 - self.settings.sinks - self.settings.capacity / 2
        return max(indexed / self.chunk, 1.0)

    @property
    def clusters(self) -> float:
        return max(self.chunks / self.settings.cluster_size, 1.0)

    @property
    def units(self) -> int:
        return self.settings.units(round(self.clusters))

    @property
    def candidates(self) -> float:
        """Clusters of the coarse units that a search keeps."""
        tokens = self.chunks * self.chunk / self.units
        wanted = -(-4 * self.settings.budget // tokens) if self.settings.k_g is None else self.settings.k_g
        return min(wanted, self.units) * self.clusters / self.units

    @property
    def taken(self) -> float:
        """Chunks that fit into the budget beside what is always attended to."""
        settings = self.settings
        return max((settings.budget - settings.sinks - settings.capacity / 2 - 1) / self.chunk, 0.0)

    def bounds(self) -> Bytes:
        """Upper bounds of units and candidates, written and read to rank them."""
        stored = (self.units + self.candidates) * SCORE_BYTES
        return Bytes(stored, stored)

    def search(self, head_dim: int, itemsize: float) -> Bytes:
        """Units and candidates with their radii and two integers each; a chunk's number and its two edges."""
        node = head_dim * itemsize + _RADIUS
        units, candidates = self.units * (node + 2 * INTEGER_BYTES), self.candidates * (node + INTEGER_BYTES)
        tables = self.taken / self.settings.cluster_size * INTEGER_BYTES + self.taken * 3 * INTEGER_BYTES
        return Bytes(read=units + candidates + tables)

    def intake(self, head_dim: int, itemsize: float) -> Bytes:
        """What a full buffer costs: its keys and every centroid read, the nearest ones moved, tables rewritten."""
        vector, new = head_dim * itemsize, self.settings.capacity / self.chunk
        moved = 2 * new * (vector + _RADIUS + INTEGER_BYTES)
        tables = (self.chunks + self.clusters) * INTEGER_BYTES
        return Bytes((self.settings.capacity + self.clusters) * vector + moved + tables, moved + tables)
