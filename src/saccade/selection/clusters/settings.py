"""What a cluster index is told: sizes of chunks, clusters and buffer, checked against the budget."""

import math
from dataclasses import dataclass
from typing import Literal

from ...errors import PolicyError
from ...kernels.chunk_keys.api import ChunkPooling
from ...text.table import Cuts
from ...types import Intake

Chunking = Literal["text", "fixed"]

LARGEST_BUFFER = 128
MOST_UNITS = 64


@dataclass(frozen=True)
class ClusterSettings:
    """LycheeCluster's constants (sections 4.3, 4.4 and appendix A) and where the paper leaves room, the choice.

    Attributes:
        budget: tokens of a set, the current one included.
        sinks: first tokens, in every set and in no chunk.
        buffer: text is looked at in multiples of so many tokens; what lies behind is attended to; None: min(128,
            budget / 4), shrunk to fit.
        replant: chunks of a group; a group is planted by itself, and anew whenever its chunks change.
        chunk_min, chunk_max: tokens of a chunk.
        chunking: "text" cuts at delimiters, "fixed" every `chunk_max` tokens.
        pooling: how a chunk's keys become one.
        cluster_size: chunks per fine cluster, on average at the build.
        every: tokens between rectifications, which are in no chunk meanwhile; 0: none.
        spread: of an index of attention mass, how many standard deviations above its mean a chunk's q·k is taken to be.

    Raises:
        PolicyError: a budget that cannot hold what is always attended to and a chunk.
    """

    budget: int = 1024
    sinks: int = 16
    buffer: int | None = None
    replant: int = 128
    chunk_min: int = 8
    chunk_max: int = 16
    chunking: Chunking = "text"
    pooling: ChunkPooling = "mean"
    cluster_size: int = 2
    every: int = 0
    spread: float = 3.0

    def __post_init__(self) -> None:
        if self.chunk_max < self.chunk_min:
            raise PolicyError(f"chunk_max={self.chunk_max} is not valid; the smallest is {self.chunk_min}")
        smallest = self._most(self.buffer or 1) + self.chunk_max
        if self.budget < smallest:
            held = f"a buffer of {self.buffer}" if self.buffer else "1 more"
            raise PolicyError(
                f"budget={self.budget} cannot hold {self.sinks} sinks, a chunk, {held} and the up to "
                f"{self.every + self.chunk_max - 1} last tokens that are in no chunk yet; the smallest is {smallest}"
            )

    @property
    def capacity(self) -> int:
        """The buffer's size."""
        if self.buffer is not None:
            return self.buffer
        most = self.budget - self._most(0) - self.chunk_max
        return min(most, max(min(LARGEST_BUFFER, self.budget // 4), 1))

    @property
    def reads_text(self) -> bool:
        return self.chunking == "text"

    @property
    def cuts(self) -> Cuts:
        return Cuts(self.sinks, self.chunk_min if self.reads_text else self.chunk_max, self.chunk_max)

    def groups(self, length: int) -> int:
        """Room for the groups of a row of `length` tokens."""
        return max(self.cuts.most(length) // self.replant + 1, -(-length // self.tokens))

    def touched(self, new: Intake) -> int:
        """The most groups of a row in which some of its chunks are new."""
        return -(-self.cuts.decided(new.kept, new.stop) // self.replant) + 1

    @property
    def sets(self) -> int:
        """Chunks of a group."""
        return self.replant

    @property
    def tokens(self) -> int:
        """The most tokens of a group."""
        return self.replant * self.chunk_max

    @property
    def clusters(self) -> int:
        """Clusters of a group."""
        return -(-self.replant // self.cluster_size)

    def stop(self, length: int, clean: int) -> int:
        """How much of the first `clean` tokens of a row of `length` is looked at: whole buffers."""
        return 0 if length <= self.budget else max(clean, 0) // self.capacity * self.capacity

    def always(self, length: int, stop: int) -> int:
        """The most tokens of a row that are attended to whatever the query, if its first `stop` were looked at."""
        if stop < self.sinks + self.chunk_max:
            return length
        return self.sinks + length - (stop - self.chunk_max + 1)

    def _most(self, buffer: int) -> int:
        """The most tokens that are attended to whatever the query, with a buffer of this size."""
        return self.sinks + buffer + self.every + self.chunk_max - 1

    def units(self, clusters: int) -> int:
        """How many coarse units stand over so many fine clusters."""
        return min(MOST_UNITS, clusters, math.isqrt(max(clusters - 1, 0)) + 1)
