"""What chooses: a scorer that rates units, a rule that cuts, the selector made of both; and what they cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import PolicyError
from ..types import HeadGrouping, KVView, Pooling, Rows, Selection
from .chunk_table import ChunkTable
from .history import TokenHistory

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


@dataclass(slots=True, eq=False)
class NewTokens:
    """The last `count` tokens of all `rows`, or all of a shorter one; one object for all layers of a step."""

    rows: Rows
    count: int
    _start: Tensor | None = None

    @property
    def start(self) -> Tensor:
        """Logical position of each row's first one, int32 `[B]`; made when it is first asked for."""
        if self._start is None:
            self._start = (self.rows.seq_lens - self.count).clamp(min=0)
        return self._start


class Index(Protocol):
    """What a selector keeps per layer beside the cache."""

    def update(self, kv: KVView, new: NewTokens) -> None:
        """Bring up to date with the cache, in which some tokens are new or rewritten."""

    def permute(self, rows: Tensor) -> None:
        """Let new batch row `i` be what row `rows[i]` was (int64 `[B']`)."""

    def heads(self, start: int, stop: int) -> Index:
        """The same index narrowed to KV heads `start..stop`; shares memory."""

    @property
    def nbytes(self) -> int:
        """Memory it holds."""


class SlotIndex(Index, Protocol):
    """An index of many rows, which enter and leave its slots.

    Attributes:
        slots: those of the batch's rows, on the host and as int32 `[B]`; None: all, in order.
    """

    slots: tuple[Sequence[int], Tensor] | None

    @property
    def stale(self) -> bool:
        """Whether the text has changed since it was last taken in."""
        ...

    def clear(self, slot: int) -> None:
        """Forget what a slot holds; the table of chunks has forgotten it."""
        ...

    def plant(self, kv: KVView, slots: Sequence[int]) -> None:
        """Take in what the text of these rows, which are in these slots, has become since the last time."""
        ...


@dataclass(frozen=True, slots=True)
class KeySizes:
    """The keys of one layer, as far as an index depends on them."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, kv: KVView) -> KeySizes:
        return cls(kv.kv_heads, kv.head_dim, kv.k.dtype, kv.k.device)


class Reserved(Protocol):
    """Indexes of all layers in memory that never moves, each with the same slots.

    Attributes:
        table: where the text is cut, a row for each slot.
        layers: their indexes, by layer.
    """

    table: ChunkTable

    @property
    def layers(self) -> Mapping[int, SlotIndex]: ...

    def clear(self, slot: int) -> None:
        """Forget what a slot holds, in the table too."""
        ...

    @property
    def stale(self) -> bool:
        """Whether the text has changed since it was last taken in."""
        ...

    def warm_up(self, kvs: Mapping[int, KVView]) -> None:
        """Run what `plant` runs, so that it is compiled; `kvs` see any one row, of which nothing is taken in.

        The last slot is empty, and stays so.
        """
        ...

    def plant(self, seen: Callable[[Sequence[int]], Mapping[int, KVView]]) -> None:
        """Take in what the text has become since the last time; caches of all layers are `seen` by some slots' rows."""
        ...

    @property
    def nbytes(self) -> int: ...


class Scorer(ABC):
    """Gives every unit (token or page) of a row a float32 score, higher is better; without an index unless it says so.

    Attributes:
        unit: tokens per unit.
        pooling: how a group's query heads share a score.
        fused: whether dense attention computes these very scores anyway, so that a PUBLISH layer gets them for free.
        bounds_page: the page whose key bounds are the whole index, so that they can lie beside a cache's own pages; or
            None.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def unit(self) -> int: ...

    @property
    @abstractmethod
    def pooling(self) -> Pooling: ...

    @property
    def fused(self) -> bool:
        return False

    @property
    def bounds_page(self) -> int | None:
        return None

    def new_index(self, kv: KVView) -> Index | None:
        """An empty index for a layer with this cache; None: it needs none."""
        return None

    @abstractmethod
    def score(self, q: Tensor, kv: KVView, index: Index | None, stored: Tensor | None = None) -> Tensor:
        """Scores float32 `[B, G, N]` in logical order for q `[B, Hq, d]`; undefined past the row's end.

        `stored` are those of all tokens `[B, G, max_len]` if dense attention has just made them; None unless `fused`.
        """

    @abstractmethod
    def traffic(self, length: int, head_dim: int, itemsize: float) -> Bytes:
        """What scoring a row of `length` tokens reads per KV head (keys or index), without the scores themselves."""

    def upkeep(self, length: int, appended: int, rewritten: int, head_dim: int, itemsize: float) -> Bytes:
        """What the index of a row costs per KV head for `appended` new tokens behind `rewritten` ones."""
        return Bytes()


class Rule(ABC):
    """Cuts scores into a set.

    Attributes:
        fixed_size: whether the size of a set follows from the row's length alone; if not, `size` is its upper bound.
        keeps_last: whether a row's last unit is in every set, whatever its score.
    """

    __slots__ = ()
    keeps_last = False

    @property
    def fixed_size(self) -> bool:
        return True

    @abstractmethod
    def choose(self, scores: Tensor, rows: Rows, unit: int, scale: float) -> Selection:
        """The set from scores float32 `[B, G, N]`, undefined past a row's end; `scale`: their factor in the softmax."""

    @abstractmethod
    def size(self, length: int, unit: int) -> int:
        """Units in the set of a row of `length` tokens."""

    def covers(self, length: int, unit: int) -> bool:
        """Whether a row of `length` tokens is always chosen whole."""
        return self.fixed_size and self.size(length, unit) * unit >= length


class Selector(ABC):
    """Chooses the set that heads attend to. Frozen: all that changes lives in the index.

    Attributes:
        heads: how many sets a layer has.
        fused_pooling: the pooling under which dense attention should store its scores, None if they are of no use.
        bounds_page: the page whose key bounds are the whole index, so that they can lie beside a cache's own pages; or
            None.
        owns_index: whether `new_index` gives any other index, which takes tokens in between steps.
        stays: whether that index can lie in memory that is set aside once, so that a captured step can search it.
        reads_text: whether that index looks at the tokens' text, so that the history must know their ids.
        assumption: what the byte counts assume about the text or the scores, in words.
        granule: tokens of a row's last unit, if it is chosen unseen and an index may wait until it is full; else 1.
    """

    __slots__ = ()

    @property
    def heads(self) -> HeadGrouping:
        return "kv"

    @property
    def fused_pooling(self) -> Pooling | None:
        return None

    @property
    def bounds_page(self) -> int | None:
        return None

    @property
    def owns_index(self) -> bool:
        return False

    @property
    def stays(self) -> bool:
        return False

    @property
    def reads_text(self) -> bool:
        return False

    @property
    def assumption(self) -> str | None:
        return None

    @property
    def granule(self) -> int:
        return 1

    def new_index(self, kv: KVView, history: TokenHistory) -> Index | None:
        """An empty index for a layer with this cache and text; None: it needs none."""
        return None

    def reserve(
        self, layers: Sequence[int], keys: KeySizes, rows: int, longest: int, history: TokenHistory
    ) -> Reserved | None:
        """Empty indexes of these layers for rows of at most `longest` tokens, in one place; None: unless it `stays`."""
        return None

    def stop(self, length: int, clean: int) -> int:
        """How much of the first `clean` tokens of a row of `length` an own index looks at."""
        return 0

    @abstractmethod
    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        """The set for q `[B, Hq, d]`; `scores` are those stored by dense attention, if it ran just before."""

    @abstractmethod
    def size(self, length: int) -> int:
        """Tokens that one set reads of a row of `length`; of pages all tokens."""

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


@dataclass(frozen=True, slots=True)
class ScoredSelector(Selector):
    """A `scorer` and a `rule`: tokens by exact scores, pages by bounds, and whatever scores units of equal size."""

    scorer: Scorer
    rule: Rule
    heads: HeadGrouping = "kv"

    @property
    def fused_pooling(self) -> Pooling | None:
        return self.scorer.pooling if self.scorer.fused else None

    @property
    def bounds_page(self) -> int | None:
        return self.scorer.bounds_page

    @property
    def assumption(self) -> str | None:
        return None if self.rule.fixed_size else "the data decide about the set's size; counted is a full buffer"

    @property
    def granule(self) -> int:
        return self.scorer.unit if self.rule.keeps_last else 1

    def new_index(self, kv: KVView, history: TokenHistory) -> Index | None:
        return self.scorer.new_index(kv)

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        units = self.scorer.score(q, kv, index, scores)
        return self.rule.choose(units, kv.rows, self.scorer.unit, scale)

    def size(self, length: int) -> int:
        return self.rule.size(length, self.scorer.unit) * self.scorer.unit

    def covers(self, length: int) -> bool:
        return self.rule.covers(length, self.scorer.unit)

    def scores(self, length: int, group: int) -> Bytes:
        units = length if self.scorer.fused else -(-length // self.scorer.unit)
        stored = units * (group if self.scorer.pooling == "each" else 1) * SCORE_BYTES
        return Bytes(stored, stored)

    def search(self, length: int, head_dim: int, itemsize: float) -> Bytes:
        return self.scorer.traffic(length, head_dim, itemsize)

    def upkeep(self, length: int, appended: int, rewritten: int, head_dim: int, itemsize: float) -> Bytes:
        return self.scorer.upkeep(length, appended, rewritten, head_dim, itemsize)


@dataclass(frozen=True, slots=True)
class WindowSelector(Selector):
    """The first `sinks` tokens and the most recent ones, `budget` in all (StreamingLLM); content plays no part."""

    budget: int
    sinks: int
    heads: HeadGrouping = "all"

    def __post_init__(self) -> None:
        if self.budget < self.sinks + 1:
            raise PolicyError(
                f"budget={self.budget} cannot hold {self.sinks} sinks and the current token; "
                f"the smallest is {self.sinks + 1}"
            )

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        lengths = kv.rows.seq_lens[:, None]
        slot = torch.arange(self.budget, dtype=torch.int32, device=lengths.device)[None]
        recent = lengths - self.budget + slot
        ids = torch.where((slot < self.sinks) | (lengths <= self.budget), slot, recent)
        ids = torch.where(slot < lengths, ids, -1)
        return Selection(ids[:, None], lengths.clamp(max=self.budget))

    def size(self, length: int) -> int:
        return min(length, self.budget)


def pooling_of(heads: HeadGrouping) -> Pooling:
    """Scores that a grouping needs: one per query head unless a KV group shares its maximum."""
    return "max" if heads == "kv" else "each"
