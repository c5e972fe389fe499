"""Quest's min/max bounds over chunks of text (the pilot study of LycheeCluster, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import PolicyError
from ...kernels._chunk_sets import fill_budget
from ...kernels._flat import host_bounds
from ...kernels.chunk_keys.api import chunk_bounds
from ...kernels.page_bounds.api import page_scores
from ...kernels.topk.api import topk
from ...types import HeadGrouping, KVView, Pooling, Selection
from ..chunk_table import ChunkTable, Cuts
from ..history import TokenHistory
from ..scorers.page_bounds import PageBounds
from ..selector import NewTokens


@dataclass(frozen=True)
class ChunkSettings:
    """Sizes of the chunks, and who shares a set.

    A chunk is cut as soon as `longest` clean tokens stand behind its start, so that its end depends on these tokens
    alone: not on when the index was built, on what was taken back since, or on how the tokens were fed.

    Attributes:
        budget: tokens of a set, the current one included.
        page: tokens of a chunk where the text is unknown, as near as the sizes below allow; also where they come from.
        chunk_min, chunk_max: tokens of a chunk; None: half a page less and half a page more than a page.
        heads: one set per KV head or per query head.
        pooling: how a group's query heads share a score; "each" if they do not.
        every: tokens between rectifications, which are in no chunk meanwhile; 0: none.

    Raises:
        PolicyError: a budget that does not hold the tokens that may be in no chunk yet, or sizes that contradict.
    """

    budget: int
    page: int = 16
    chunk_min: int | None = None
    chunk_max: int | None = None
    heads: HeadGrouping = "kv"
    pooling: Pooling = "max"
    every: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise PolicyError(
                f"chunk_min={self.shortest} does not fit chunk_max={self.longest}: 1 to {self.longest} are valid"
            )
        smallest = self.longest + max(self.every, 1)
        if self.budget < smallest:
            raise PolicyError(
                f"budget={self.budget} cannot hold the up to {smallest} last tokens that are in no chunk yet; "
                f"the smallest is {smallest}"
            )

    @property
    def shortest(self) -> int:
        return max(self.page // 2, 1) if self.chunk_min is None else self.chunk_min

    @property
    def longest(self) -> int:
        # So that chunks of English average a page: the latest break wins, and spaces are everywhere.
        return self.page + self.page // 4 if self.chunk_max is None else self.chunk_max

    @property
    def cuts(self) -> Cuts:
        return Cuts(0, self.shortest, self.longest, self.without_text)

    def stop(self, length: int, clean: int) -> int:
        """How much of the first `clean` tokens of a row of `length` is looked at."""
        return max(clean, 0)

    def always(self, length: int, stop: int) -> int:
        """The most tokens of a row that are in no chunk, if its first `stop` were looked at."""
        return length - max(stop - self.longest + 1, 0)

    @property
    def without_text(self) -> int:
        """Tokens of a chunk where nobody knows what they say."""
        return min(max(self.page, self.shortest), self.longest)


@dataclass(slots=True)
class ChunkBounds:
    """Bounds of one layer's chunks.

    Attributes:
        settings: sizes.
        table: where the text is cut; shared with the other layers.
        history: how far the cache is clean.
        bounds: of chunk i as of a page.
        slots: where the batch's rows are in the table, on the host and as int32 `[B]`; None: all, in order.
        version: of the table that the bounds were made from.
    """

    settings: ChunkSettings
    table: ChunkTable
    history: TokenHistory
    bounds: PageBounds
    slots: tuple[Sequence[int], Tensor] | None = None
    version: int = 0

    @classmethod
    def empty(cls, settings: ChunkSettings, table: ChunkTable, history: TokenHistory, kv: KVView) -> ChunkBounds:
        """An index without chunks."""
        room = kv.k.new_empty((len(table.stops), kv.kv_heads, 1, kv.head_dim))
        return cls(settings, table, history, PageBounds(room, room.clone(), page=1))

    def update(self, kv: KVView, new: NewTokens) -> None:
        # Nearly always there is nothing to do, in every layer of every step.
        if self.table.seen is not new.rows:
            self.history.follow(self.table, new.rows, new.count, self.settings.stop)
        if self.version != self.table.version:
            self.plant(kv)

    def plant(self, kv: KVView, slots: Sequence[int] | None = None) -> None:
        """Compute the bounds of the chunks that the table has changed since the last time; `kv` has these rows.

        They are in `slots`; None: all rows, in order.
        """
        change, table = self.table.since(self.version), self.table
        # Also for a row of which nothing is indexed.
        self.bounds.reserve(0, rows=len(table.stops))
        if change is None:
            return
        held = range(kv.rows.batch) if slots is None else slots
        kv = kv.picked([held.index(slot) for slot in change.rows])
        chosen = torch.tensor(change.rows, device="cpu").to(kv.k.device, non_blocking=True)
        number = change.most
        if chosen.is_cpu:
            # Reading them costs nothing here, and chunks that are not there would be pooled else.
            number = max(int((change.last - change.first).max()), 1)
        self.bounds.reserve(table.cuts.most(max(table.stops)) + number, rows=len(table.stops))
        chunk = change.first[:, None] + torch.arange(number + 1, device=chosen.device)
        counts = table.counts.index_select(0, chosen)[:, None]
        edges = table.edges.index_select(0, chosen).gather(1, torch.minimum(chunk, counts))
        heads = torch.arange(kv.kv_heads, device=chosen.device)[:, None]
        places = chosen[:, None, None], heads, chunk[:, None, :-1]
        lower, upper = chunk_bounds(kv, edges, longest=self.settings.longest)
        self.bounds.lower[places], self.bounds.upper[places] = lower.to(kv.k.dtype), upper.to(kv.k.dtype)
        # Only now: who was interrupted does it again.
        self.version = table.version

    @property
    def stale(self) -> bool:
        return self.version != self.table.version or self.bounds.lower.shape[0] < len(self.table.stops)

    def clear(self, slot: int) -> None:
        """Nothing to forget: chunks that the table does not have are not read."""

    def search(self, q: Tensor, kv: KVView) -> Selection:
        """The best chunks for queries `[B, Hq, d]` until the next does not fit, and everything behind the last one.

        All chunks of a row that the budget covers fit.
        """
        settings, table, lengths = self.settings, self.table, kv.rows.seq_lens
        slots = range(kv.rows.batch) if self.slots is None else self.slots[0]
        bounds = host_bounds(kv.rows)
        most = max(table.cuts.most(max(table.stops[slot] for slot in slots)), 1)
        width = max(settings.always(length, table.stops[slot]) for slot, (_, length) in zip(slots, bounds, strict=True))
        held = [self.bounds.lower[:, :, :most], self.bounds.upper[:, :, :most], table.counts, table.edges]
        if self.slots is not None:
            held = [tensor.index_select(0, self.slots[1]) for tensor in held]
        lower, upper, counts, edges = held
        scores = page_scores(q, lower, upper, counts, page=1, pooling=settings.pooling)
        best, _ = topk(scores, counts, min(most, settings.budget // settings.shortest), order="score")
        numbers = best.clamp(min=0).long()
        edges_of = edges[:, None].expand(-1, numbers.shape[1], -1)
        starts = edges_of.gather(-1, numbers).long()
        sizes = (edges_of.gather(-1, numbers + 1) - starts).masked_fill(best < 0, 0)
        tail = edges.gather(1, counts[:, None].long())[:, 0]
        head, budget = torch.zeros_like(tail), settings.budget
        width = max(width, budget)
        return fill_budget(numbers, starts, sizes, lengths, head=head, tail=tail, budget=budget, width=width)

    def permute(self, rows: Tensor) -> None:
        self.bounds.permute(rows)

    def heads(self, start: int, stop: int) -> ChunkBounds:
        return replace(self, bounds=self.bounds.heads(start, stop))

    @property
    def nbytes(self) -> int:
        return self.bounds.nbytes
