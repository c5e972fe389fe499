"""What choosing moves in memory, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

SCORE_BYTES = 4
"""Of a score, which is float32 whatever the cache holds."""
INTEGER_BYTES = 4
"""Of a number of an index's tables."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory `read` and `written`, `total` their sum; fractions come from sharing an occasional expense among steps."""

    read: float = 0.0
    written: float = 0.0

    @property
    def total(self) -> float:
        return self.read + self.written

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.read + other.read, self.written + other.written)

    def times(self, factor: float) -> Bytes:
        """So many times as much."""
        return Bytes(self.read * factor, self.written * factor)
