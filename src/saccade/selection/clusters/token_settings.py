"""What an index of single tokens is told: sizes of clusters, blocks and buffer, checked against the budget."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import PolicyError
from .settings import LARGEST_BUFFER


@dataclass(frozen=True)
class TokenSettings:
    """Constants of `token_clusters`.

    Attributes:
        budget: tokens of a set, the current one included.
        sinks: first tokens, in every set and in no cluster.
        buffer: tokens are clustered in multiples of so many, a power of two; what lies behind is attended to; None:
            the largest up to 128 and a quarter of the budget that fits.
        cluster_size: tokens of a cluster, on average.
        group: tokens that are clustered together; of what fills no group, one block for every binary digit.
        spread: how many standard deviations above its mean a cluster's q·k is taken to be.
        every: tokens between rectifications, which are in no cluster meanwhile; 0: none.

    Raises:
        PolicyError: sizes that are no powers of two, or a budget that cannot hold what is always attended to and a
            token.
    """

    budget: int
    sinks: int
    buffer: int | None
    cluster_size: int
    group: int
    spread: float
    every: int

    def __post_init__(self) -> None:
        for name, value in (("buffer", self.buffer), ("cluster_size", self.cluster_size), ("group", self.group)):
            if value is not None and value & (value - 1):
                raise PolicyError(f"{name}={value} is not valid; it must be a power of two")
        if self.buffer is not None and not self.cluster_size <= self.buffer <= self.group:
            raise PolicyError(
                f"buffer={self.buffer} is not valid: {self.cluster_size} (a cluster) to {self.group} (a group) are"
            )
        smallest = self._always(self.buffer or self.cluster_size) + 1
        if self.budget < smallest:
            raise PolicyError(
                f"budget={self.budget} cannot hold {self.sinks} sinks, one token of a cluster and the up to "
                f"{smallest - self.sinks - 1} last ones that are in none yet; the smallest is {smallest}"
            )

    @property
    def capacity(self) -> int:
        """The buffer's size."""
        if self.buffer is not None:
            return self.buffer
        most = min(LARGEST_BUFFER, self.budget // 4, self.budget - self._always(0) - 1, self.group)
        return max(1 << max(most, 1).bit_length() - 1, self.cluster_size)

    @property
    def tokens(self) -> int:
        return self.group

    @property
    def sets(self) -> int:
        """Clusters of a group."""
        return self.group // self.cluster_size

    def groups(self, length: int) -> int:
        """Room for the groups of a row of `length` tokens."""
        return max(-(-length // self.group), 1)

    def stop(self, length: int, clean: int) -> int:
        """How much of the first `clean` tokens of a row of `length` is looked at: whole buffers."""
        stop = 0 if length <= self.budget else max(clean, 0) // self.capacity * self.capacity
        return stop if stop > self.sinks else 0

    def blocks(self, stop: int) -> Iterator[tuple[int, int]]:
        """Start and tokens of the blocks of the first `stop` tokens, from the left; a binary counter of buffers."""
        start, size = 0, self.group
        while start < stop:
            while size > stop - start:
                size //= 2
            yield start, size
            start += size

    def changed(self, kept: int, stop: int) -> list[tuple[int, int]]:
        """Those that the first `kept` tokens had not."""
        return sorted({*self.blocks(stop)} - {*self.blocks(kept)})

    def _always(self, buffer: int) -> int:
        """The most tokens that are attended to whatever the query, with a buffer of this size."""
        return self.sinks + max(buffer - 1, 0) + self.every + 1
