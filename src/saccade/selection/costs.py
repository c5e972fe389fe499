"""What choosing costs, in bytes: of scores, searches and the upkeep of indexes."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class Costs(ABC):
    """Sizes of the sets that a selector chooses, and what choosing them moves in memory.

    Attributes:
        assumption: what the byte counts assume about the text or the scores, in words.
    """

    __slots__ = ()

    @property
    def assumption(self) -> str | None:
        return None

    @abstractmethod
    def size(self, length: int) -> int:
        """Tokens that one set reads of a row of `length`; of pages all tokens."""

    def frame(self, length: int) -> tuple[int, int] | None:
        """First and last tokens that are in every set of a row of `length`, whatever their scores; None: not said."""
        return None

    def covers(self, length: int) -> bool:
        """Whether a row of `length` tokens is always chosen whole."""
        return self.size(length) >= length

    def scores(self, length: int, group: int) -> Bytes:
        """Scores written and read again for the cut, per KV head of `group` query heads."""
        return Bytes()

    def search(self, length: int, head_dim: int, itemsize: float) -> Bytes:
        """What making the scores reads per KV head, where dense attention does not make them anyway."""
        return Bytes()

    def upkeep(self, length: int, appended: int, rewritten: int, head_dim: int, itemsize: float) -> Bytes:
        """What the index of a row costs per KV head for `appended` new tokens behind `rewritten` ones."""
        return Bytes()
