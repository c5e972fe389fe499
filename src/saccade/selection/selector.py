"""What chooses: a scorer that rates units, a rule that cuts, the selector made of both."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PolicyError
from ..text.levels import Codes, break_codes
from ..types import HeadGrouping, KVView, Pooling, Rows, Selection
from .costs import SCORE_BYTES, Bytes
from .index import Index, PageIndex, SlotIndex, SlotSizes


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
    fused = False

    @property
    @abstractmethod
    def unit(self) -> int: ...

    @property
    @abstractmethod
    def pooling(self) -> Pooling: ...

    @property
    def bounds_page(self) -> int | None:
        return None

    def new_index(self, kv: KVView) -> PageIndex | None:
        """An empty index for a layer with this cache; None: it needs none."""
        return None

    @abstractmethod
    def score(self, q: Tensor, kv: KVView, index: Index | None, stored: Tensor | None = None) -> Tensor:
        """Scores float32 `[B, G, N]` in logical order for q `[B, Hq, d]`; undefined past the row's end.

        `stored` are those of all tokens `[B, G, max_len]` if dense attention has just made them; None unless `fused`.
        """

    def tiled(
        self, q: Tensor, kv: KVView, index: Index | None, stored: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Scores, and the best of neighbours where they are at hand anyway (`kernels.topk.api.topk_and_last`)."""
        return self.score(q, kv, index, stored), None

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

    def choose_tiled(self, scores: Tensor, tiles: Tensor | None, rows: Rows, unit: int, scale: float) -> Selection:
        """The same, with what `Scorer.tiled` knows of the scores."""
        return self.choose(scores, rows, unit, scale)

    @abstractmethod
    def size(self, length: int, unit: int) -> int:
        """Units in the set of a row of `length` tokens."""

    def frame(self, length: int, unit: int) -> tuple[int, int]:
        """First and last tokens that are in every set of a row of `length`."""
        return 0, unit if self.keeps_last else 0

    def covers(self, length: int, unit: int) -> bool:
        """Whether a row of `length` tokens is always chosen whole."""
        return self.fixed_size and self.size(length, unit) * unit >= length


class Selector(ABC):
    """Chooses the set that heads attend to, and counts what that moves. Frozen: all that changes lives in the index.

    Attributes:
        heads: how many sets a layer has.
        fused_pooling: the pooling under which dense attention should store its scores, None if they are of no use.
        bounds_page: the page whose key bounds are the whole index, so that they can lie beside a cache's own pages; or
            None.
        owns_index: whether it has one in slots, which takes tokens in between steps.
        reads_text: whether that index looks at the tokens' text, so that somebody must know their ids.
        codes: what it looks at: numbers of the vocabulary's pieces.
        granule: tokens of a row's last unit, if it is chosen unseen and an index may wait until it is full; else 1.
        assumption: what the byte counts assume about the text or the scores, in words.
    """

    __slots__ = ()
    heads: HeadGrouping = "kv"
    owns_index = False

    @property
    def fused_pooling(self) -> Pooling | None:
        return None

    @property
    def bounds_page(self) -> int | None:
        return None

    @property
    def reads_text(self) -> bool:
        return False

    @property
    def codes(self) -> Codes:
        return break_codes

    @property
    def granule(self) -> int:
        return 1

    def new_index(self, kv: KVView) -> PageIndex | None:
        """An empty index of the pages of a layer with this cache; None: it needs none."""
        return None

    def new_slots(self, sizes: SlotSizes) -> SlotIndex | None:
        """An empty index in slots; None unless it `owns_index`, and for a fixed one, if it cannot stay in one place."""
        return None

    def stop(self, length: int, clean: int) -> int:
        """How much of the first `clean` tokens of a row of `length` an index in slots looks at."""
        return 0

    @abstractmethod
    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        """The set for q `[B, Hq, d]`; `scores` are those stored by dense attention, if it ran just before."""

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

    def new_index(self, kv: KVView) -> PageIndex | None:
        return self.scorer.new_index(kv)

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        scored = self.scorer.tiled(q, kv, index, scores)
        return self.rule.choose_tiled(*scored, kv.rows, self.scorer.unit, scale)

    def size(self, length: int) -> int:
        return self.rule.size(length, self.scorer.unit) * self.scorer.unit

    def frame(self, length: int) -> tuple[int, int]:
        return self.rule.frame(length, self.scorer.unit)

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
        ids = torch.where((slot < self.sinks) | (lengths <= self.budget), slot, lengths - self.budget + slot)
        return Selection(torch.where(slot < lengths, ids, -1)[:, None], lengths.clamp(max=self.budget))

    def size(self, length: int) -> int:
        return min(length, self.budget)

    def frame(self, length: int) -> tuple[int, int]:
        return self.sinks, self.budget - self.sinks


def pooling_of(heads: HeadGrouping) -> Pooling:
    """Scores that a grouping needs: one per query head unless a KV group shares its maximum."""
    return "max" if heads == "kv" else "each"
