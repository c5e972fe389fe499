"""Sets of tokens, each with the mean of its keys: what the attention mass that it draws is estimated from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MassTree:
    """Slots of one index each, which rows of a batch enter and leave; H KV heads, U places for sets, N for tokens.

    Attributes:
        means: `[R, H, U, d]` in the cache's dtype: of the keys of a set's tokens.
        spreads: float32 `[R, H, U]`, root of the mean squared distance of these keys from their mean.
        sizes: int32 `[R, H, U]`, tokens of a set; one without any is none, whatever else is left of it.
        labels: int16 or int32 `[R, H, N]`, a token's set among those of its group.
        ends: int32 `[R]`, logical position behind the last token that is in a set; 0 where nothing is indexed.
        used: int32 `[R]`, places behind which there is no set.
        tokens, sets: a token at position p has the set `labels[p] + p // tokens · sets`.
    """

    means: Tensor
    spreads: Tensor
    sizes: Tensor
    labels: Tensor
    ends: Tensor
    used: Tensor
    tokens: int
    sets: int

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in (self.means, self.spreads, self.sizes, self.labels, self.ends, self.used))

    def heads(self, start: int, stop: int) -> MassTree:
        """The tree of KV heads `start..stop`; shares memory."""
        part = slice(start, stop)
        means, spreads, sizes, labels = (held[:, part] for held in (self.means, self.spreads, self.sizes, self.labels))
        return replace(self, means=means, spreads=spreads, sizes=sizes, labels=labels)


class MassSettings(NamedTuple):
    """How sets are scored.

    Attributes:
        width: tokens for which there are scores, a host bound on the rows' lengths.
        sinks: first tokens, which are in no set.
        scale: factor of q·k in the softmax.
        spread: how many standard deviations above its mean a set's q·k is taken to be.
        each: scores per query head instead of per KV head.
    """

    width: int
    sinks: int
    scale: float
    spread: float
    each: bool = False
