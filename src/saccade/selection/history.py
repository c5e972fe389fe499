"""What was fed to a model, slot by slot of its cache: token ids, their positions, and how far the cache is clean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels._flat import host_bounds
from ..types import KVView, Rows
from .chunk_table import ChunkTable, Cuts, Feed

UNREAD = "some tokens were fed as embeddings or are not in the tokenizer's vocabulary; their chunks have a fixed length"

ALL_CLEAN = 2**62
"""`clean` of a cache that nobody rectifies: all of it counts as final."""

UNKNOWN = -1
"""Instead of the id of a token that was fed as an embedding."""
ABSENT = -2
"""Instead of an id where no token is."""
_GROWTH = 256


class TokenHistory:
    """Token ids and position ids beside one cache, by slot; unknown where a model was fed embeddings.

    Attributes:
        levels: delimiter level of every vocabulary id (`saccade.selection.chunking`), None without a tokenizer.
        clean: slots below it hold keys and values that no sparse step wrote, or that were rectified since.
        prompt: slots below it were fed as prompt, or in calls before one.
        tables: where the text is cut, by sizes and by whether it is read.
    """

    def __init__(self, levels: Sequence[int] | None = None) -> None:
        self.levels = levels
        self.clean = ALL_CLEAN
        self.prompt = 0
        self._length = 0
        self._fed: Tensor | None = None
        self._table: Tensor | None = None
        self._unread: Tensor | bool = False
        self.tables: dict[tuple[Cuts, bool], ChunkTable] = {}

    def record(self, past: int, queries: int, batch: int, ids: Tensor | None, positions: Tensor | None) -> None:
        """Note what is fed behind `past` slots: int64 `[B, queries]` each, or None; whatever lay there before goes.

        Slots that were filled unseen count as clean with all below them: what lies there cannot be fed again.
        """
        stop = past + queries
        fed = self._room(batch, stop, ids if ids is not None else positions)
        if self._length < past:
            self.clean = past
        fed[:, :, self._length : past] = UNKNOWN
        for row, given in enumerate((ids, positions)):
            fed[row, :, past:stop] = UNKNOWN if given is None else given
        self._length = stop

    def tell(self, ids: Tensor) -> None:
        """Note which tokens int64 `[B, n]` somebody else has fed, densely; those that were seen here stay."""
        known, stop = self._length, ids.shape[1]
        if stop > known:
            self.record(known, stop - known, ids.shape[0], ids[:, known:], None)
            self.clean = max(self.clean, stop)

    def forget(self, slots: int) -> None:
        """What was fed from slot `slots` on was taken back; others may come there unseen."""
        self._length = min(self._length, slots)

    def settle(self, slots: int) -> None:
        """The cache ends at slot `slots` and is clean; of what was fed behind it, some may be settled later."""
        self.clean = self._length = slots

    def ids(self, start: int, stop: int) -> Tensor | None:
        """Token ids int64 `[B, stop - start]`; None if one of them is unknown."""
        return self._slice(0, start, stop)

    def fed(self, start: int, stop: int) -> Tensor:
        """As `ids`, of slots whose ids are known to be known: nothing waits for the device."""
        assert self._fed is not None and stop <= self._length, "they were recorded"
        return self._fed[0, :, start:stop]

    def positions(self, start: int, stop: int) -> Tensor | None:
        """Position ids int64 `[B, stop - start]`; None if one of them is unknown."""
        return self._slice(1, start, stop)

    def window(self, rows: Tensor, first: Tensor, width: int) -> Tensor:
        """Delimiter levels int8 `[n, width]` from slot `first[i]` of row `rows[i]` (int64 `[n]`) on; -1: unknown."""
        slots = first[:, None] + torch.arange(width, device=first.device)
        if self.levels is None:
            return torch.full_like(slots, UNKNOWN, dtype=torch.int8)
        if self._table is None:
            # The last place stands for every id that is not in the vocabulary.
            table = torch.tensor([*self.levels, UNKNOWN], dtype=torch.int8, device="cpu")
            self._table = table.to(slots.device, non_blocking=True)
        ids = self.read(rows, slots)
        known = (ids >= 0) & (ids < len(self.levels))
        self._unread = ((ids == UNKNOWN) | (ids >= len(self.levels))).any() | self._unread
        return self._table[torch.where(known, ids, len(self.levels))]

    def read(self, rows: Tensor, slots: Tensor) -> Tensor:
        """Ids int64 `[n, w]` at slots `[n, w]` of `rows` `[n]`; -1: unknown, below: no token."""
        if self._fed is None:
            return torch.full_like(slots, UNKNOWN)
        ids = self._fed[0].to(slots.device)[rows[:, None], slots.clamp(max=self._fed.shape[2] - 1)]
        return torch.where(slots < self._length, ids, ABSENT)

    def chunks(self, cuts: Cuts, kv: KVView, *, text: bool) -> ChunkTable:
        """The table of chunks of these sizes, which all layers share; `text`: cut where it breaks."""
        key = cuts, text
        if key not in self.tables:
            self.tables[key] = ChunkTable(cuts, self if text else None, self.rows_of(kv), kv.k.device)
        return self.tables[key]

    def rows_of(self, kv: KVView) -> int:
        """How many rows a table has."""
        return kv.rows.batch

    @property
    def nbytes(self) -> int:
        """Of the tables of chunks."""
        return sum(table.nbytes for table in self.tables.values())

    def follow(self, table: ChunkTable, rows: Rows, count: int, stop: Callable[[int, int], int]) -> None:
        """Bring a table up to the rows of a step, whose last `count` tokens are new or rewritten.

        `stop` says how much of a row's clean tokens is looked at, given its length and their number.
        """
        if table.seen is rows:
            return
        feeds = self.feeds(table, host_bounds(rows), count, stop)
        if feeds:
            table.bring(feeds)
        table.seen = rows

    def feeds(
        self, table: ChunkTable, bounds: Sequence[tuple[int, int]], count: int, stop: Callable[[int, int], int]
    ) -> list[Feed]:
        """What a table lacks of rows with these starts and lengths; otherwise as `follow`."""
        feeds = []
        for row, (slot, length) in enumerate(bounds):
            kept, looked_at = max(length - count, 0), stop(length, min(length - 1, self.clean - slot))
            # In most steps nothing is to be cut anew.
            if looked_at != table.stops[row] or kept < looked_at:
                feeds.append(Feed(row, slot, kept, looked_at))
        return feeds

    @property
    def unread(self) -> Tensor | bool:
        """Whether text was asked for where none is known, as where a model was fed embeddings."""
        return self._unread

    def continued(self, levels: Sequence[int] | None) -> TokenHistory:
        """The same feed for another run on the same cache, which may know other levels."""
        other = TokenHistory(levels)
        other.clean, other.prompt, other._length = self.clean, self.prompt, self._length
        other._fed = None if self._fed is None else self._fed.clone()
        return other

    def permute(self, rows: Tensor) -> None:
        """Let new batch row `i` be what row `rows[i]` was (int64 `[B']`)."""
        for table in self.tables.values():
            table.permute(rows)
        if self._fed is not None:
            self._fed = self._fed.index_select(1, rows.to(self._fed.device))

    def _slice(self, row: int, start: int, stop: int) -> Tensor | None:
        if self._fed is None or not 0 <= start <= stop <= self._length:
            return None
        part = self._fed[row, :, start:stop]
        return None if bool((part == UNKNOWN).any()) else part.clone()

    def _room(self, batch: int, slots: int, like: Tensor | None) -> Tensor:
        """The buffer `[2, B, capacity]`; a cache whose batch has changed unasked is another one."""
        held = self._fed
        if held is None or held.shape[1] != batch:
            device = None if like is None else like.device
            held = torch.empty((2, batch, 0), dtype=torch.int64, device=device)
            self._length = 0
        if held.shape[2] < slots:
            wider = held.new_full((2, batch, slots + max(_GROWTH, slots // 8)), UNKNOWN)
            wider[:, :, : self._length] = held[:, :, : self._length]
            held = wider
        self._fed = held
        return held
