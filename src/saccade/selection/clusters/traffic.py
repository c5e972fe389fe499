"""How much of a cluster index a search and the intake of new tokens move, in bytes per KV head."""

import math
from dataclasses import dataclass

from ..costs import INTEGER_BYTES, SCORE_BYTES, Bytes
from .settings import ClusterSettings

_RADIUS = 4


@dataclass(frozen=True, slots=True)
class ClusterTraffic:
    """The index of a row of `length` tokens in mid-course: buffer and last group half full, chunks of equal size.

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
    def open(self) -> float:
        """Tokens that are in no chunk, the current one included."""
        settings = self.settings
        return settings.every / 2 + settings.capacity / 2 + settings.chunk_max / 2 + 1

    @property
    def chunks(self) -> float:
        """Chunks in the index."""
        return max((self.length - self.settings.sinks - self.open) / self.chunk, 1.0)

    @property
    def together(self) -> float:
        """Chunks that are planted together."""
        return min(self.settings.replant, self.chunks)

    @property
    def units(self) -> float:
        clusters = max(round(self.together / self.settings.cluster_size), 1)
        return self.settings.units(clusters) * self.chunks / self.together

    @property
    def candidates(self) -> float:
        """Clusters of the coarse units that a search keeps."""
        tokens, clusters = self.chunks * self.chunk / self.units, self.chunks / self.settings.cluster_size
        return min(max(math.ceil(4 * self.settings.budget / tokens), 1), self.units) * clusters / self.units

    def bounds(self) -> Bytes:
        """Upper bounds of units and candidates, written and read to rank them."""
        stored = (self.units + self.candidates) * SCORE_BYTES
        return Bytes(stored, stored)

    def search(self, head_dim: int, itemsize: float) -> Bytes:
        """Units and candidates with their radii and two integers each; of chunks, so little that it is left out."""
        node = head_dim * itemsize + _RADIUS
        units, candidates = self.units * (node + 2 * INTEGER_BYTES), self.candidates * (node + INTEGER_BYTES)
        return Bytes(read=units + candidates)

    def intake(self, head_dim: int, itemsize: float) -> Bytes:
        """What a full buffer costs: the last group's keys read and, half full, planted anew."""
        settings, vector, half = self.settings, head_dim * itemsize, self.together / 2
        nodes = half / settings.cluster_size + settings.units(max(round(half / settings.cluster_size), 1))
        return Bytes(half * self.chunk * vector, nodes * (vector + _RADIUS + 2 * INTEGER_BYTES) + half * INTEGER_BYTES)
