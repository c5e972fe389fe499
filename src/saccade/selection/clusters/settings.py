"""What a cluster index is told: sizes of chunks, clusters and buffer, checked against the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ...errors import PolicyError
from ...kernels.chunk_keys.api import ChunkPooling

Chunking = Literal["text", "fixed"]
Coarse = Literal["sqrt", "cap64", "root"]

LARGEST_BUFFER = 128
MOST_UNITS = 64


@dataclass(frozen=True)
class ClusterSettings:
    """LycheeCluster's constants (sections 4.3, 4.4 and appendix A) and where the paper leaves room, the choice.

    Attributes:
        budget: tokens of a set, the current one included.
        sinks: first tokens, in every set and in no chunk.
        buffer: so many tokens behind the last chunk are cut into chunks; None: min(128, budget / 4), shrunk to fit.
        chunk_min, chunk_max: tokens of a chunk.
        chunking: "text" cuts at delimiters, "fixed" every `chunk_max` tokens.
        pooling: how a chunk's keys become one.
        cluster_size: chunks per fine cluster, on average at the build.
        coarse: "sqrt" makes min(64, sqrt(clusters)) coarse units, "root" as many without the limit, "cap64" 64 wherever
            there are that many clusters.
        k_g: coarse units that a search keeps; None: as many as hold 4 budgets of tokens.
        every: tokens between rectifications, during which they stay in the buffer; 0: none.

    Raises:
        PolicyError: a value out of range, or a budget that cannot hold what is always attended to and a chunk.
    """

    budget: int = 1024
    sinks: int = 16
    buffer: int | None = None
    chunk_min: int = 8
    chunk_max: int = 16
    chunking: Chunking = "text"
    pooling: ChunkPooling = "mean"
    cluster_size: int = 2
    coarse: Coarse = "sqrt"
    k_g: int | None = None
    every: int = 0

    def __post_init__(self) -> None:
        self._check_values()
        least = max(self.every, 1)
        if self.buffer is not None and self.buffer < least:
            reason = f" holds fewer tokens than the {self.every} between rectifications" if self.every else ""
            raise PolicyError(f"buffer={self.buffer}{reason} is not valid; the smallest is {least}")
        smallest = self.sinks + self.chunk_max + (least if self.buffer is None else self.buffer)
        if self.budget < smallest:
            held = f"a buffer of {self.buffer}" if self.buffer else f"{least} more"
            raise PolicyError(
                f"budget={self.budget} cannot hold {self.sinks} sinks, a chunk and {held}; the smallest is {smallest}"
            )

    @property
    def capacity(self) -> int:
        """The buffer's size: at so many tokens between the last chunk and the current token it is cut."""
        if self.buffer is not None:
            return self.buffer
        least = max(self.every, 1)
        most = self.budget - self.sinks - self.chunk_max
        return max(least, min(most, max(least, min(LARGEST_BUFFER, self.budget // 4))))

    def units(self, clusters: int) -> int:
        """How many coarse units stand over so many fine clusters."""
        if self.coarse == "cap64":
            return min(MOST_UNITS, clusters)
        root = min(math.isqrt(max(clusters - 1, 0)) + 1, clusters)
        return root if self.coarse == "root" else min(MOST_UNITS, root)

    def _check_values(self) -> None:
        for name, least in (("sinks", 0), ("every", 0), ("chunk_min", 1), ("chunk_max", self.chunk_min)):
            if getattr(self, name) < least:
                raise PolicyError(f"{name}={getattr(self, name)} is not valid; the smallest is {least}")
        if not 1 <= self.cluster_size <= 8:
            raise PolicyError(f"cluster_size={self.cluster_size} is not valid; 1 to 8 are")
        if self.k_g is not None and self.k_g < 1:
            raise PolicyError(f"k_g={self.k_g} is not valid; the smallest is 1")
        for name, valid in (("chunking", Chunking), ("pooling", ChunkPooling), ("coarse", Coarse)):
            if getattr(self, name) not in get_args(valid):
                raise PolicyError(f"{name}={getattr(self, name)!r} is not valid; use {' or '.join(get_args(valid))}")
