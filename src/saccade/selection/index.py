"""What selectors keep beside a cache: bounds of its pages, or indexes of their own in slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ..text.feed import TokenFeed
from ..types import Intake, KVView, Rows


@dataclass(frozen=True, slots=True)
class KeySizes:
    """The keys of one layer, as an index depends on them: KV `heads` of `head_dim` numbers, `dtype`, `device`."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, kv: KVView) -> KeySizes:
        """Those of a layer's cache."""
        return cls(kv.kv_heads, kv.head_dim, kv.k.dtype, kv.k.device)


NOWHERE = KeySizes(1, 16, torch.float32, torch.device("meta"))
"""Keys without content, to ask what an index of some would be."""


@dataclass(frozen=True, eq=False)
class NewTokens:
    """The last `count` tokens of all `rows`, or all of a shorter one; one object for all layers of a step."""

    rows: Rows
    count: int

    @cached_property
    def start(self) -> Tensor:
        """Logical position of each row's first one, int32 `[B]`."""
        return (self.rows.seq_lens - self.count).clamp(min=0)


class PageIndex(Protocol):
    """Of one layer, a page of it for every page of the cache: a row's part lies where the row lies."""

    def update(self, kv: KVView, new: NewTokens) -> None:
        """Bring up to date with the cache, in which some tokens are new or rewritten."""

    def permute(self, rows: Tensor) -> None:
        """Let new batch row `i` be what row `rows[i]` was (int64 `[B']`)."""

    def heads(self, start: int, stop: int) -> PageIndex:
        """The same index narrowed to KV heads `start..stop`; shares memory."""

    @property
    def nbytes(self) -> int:
        """Memory it holds."""


class LayerIndex(Protocol):
    """One layer's part of a `SlotIndex`, as its selector knows it: of rows that are in the slots where these are."""

    def heads(self, start: int, stop: int) -> LayerIndex:
        """The same index narrowed to KV heads `start..stop`; shares memory."""


@dataclass(frozen=True, slots=True)
class Views:
    """The caches of some `layers`; `of` gives them as the sequences in some slots see them, each a row."""

    layers: tuple[int, ...]
    of: Callable[[Sequence[int]], Mapping[int, KVView]]


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """What an index in slots is made for.

    Attributes:
        layers, keys: whose keys it looks at, and their sizes.
        slots, longest: how many sequences there are, and the most tokens of any; one that is not `fixed` may grow.
        text: what they are fed.
        fixed: all lies in memory that never moves, so that a captured step can search it, whose shapes follow from
            these numbers alone.
    """

    layers: Sequence[int]
    keys: KeySizes
    slots: int
    longest: int = 0
    text: TokenFeed | None = None
    fixed: bool = False


class SlotIndex(Protocol):
    """An index of all layers of sequences that enter and leave its slots.

    What is in a slot must follow from its sequence's clean tokens alone, not from the calls that brought them.
    """

    @property
    def layers(self) -> Mapping[int, LayerIndex]:
        """By layer. The object of a layer is another one after whatever moves the index in memory."""
        ...

    def take_in(self, new: Sequence[Intake], views: Views) -> None:
        """Let those layers hold of each slot what follows from its first `stop` tokens; nothing of others is asked.

        In a call of several tokens a layer goes through all of them before the next one sees the first. An empty slot
        of which no token is new stays empty: what runs then is compiled ahead of the first sequence.
        """

    def place(self, slots: Sequence[int], on_device: Tensor) -> None:
        """Let the rows of the next steps be in these slots, int32 `[B]`; at first row i is in slot i.

        Captured steps read the same memory each time.
        """

    def grow(self, slots: int, longest: int) -> None:
        """Have room for so many slots and tokens; never asked of one that was made `fixed`."""

    def clear(self, slot: int) -> None:
        """Let a slot be empty, in all layers."""

    def permute(self, rows: Tensor) -> None:
        """Let new slot `i` be what slot `rows[i]` was (int64 `[S']`)."""

    @property
    def nbytes(self) -> int:
        """Memory it holds."""


Index = PageIndex | LayerIndex
"""What a selector is given of one layer."""
