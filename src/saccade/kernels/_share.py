"""How many of a row's entries stay, where that is a share of the row."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Share:
    """Of M entries, min(M, max(`minimum`, ⌈M · `numerator` / `denominator`⌉)) (ReSA, equation 4).

    Attributes:
        numerator, denominator: of a share from 0 to 1, both below 2^31.
        minimum: at least 1.
    """

    numerator: int
    denominator: int
    minimum: int = 1

    def of(self, entries: int) -> int:
        """How many of a row's entries stay, on the host."""
        return min(entries, max(self.minimum, -(-entries * self.numerator // self.denominator)))

    def of_each(self, entries: Tensor) -> Tensor:
        """The same of every row, int32 `[B]`, without a look at it."""
        kept = (entries.long() * self.numerator + (self.denominator - 1)).div(self.denominator, rounding_mode="floor")
        return kept.clamp(min=self.minimum).minimum(entries).int()
