"""Quest's min/max bounds over chunks of text (the pilot study of LycheeCluster, section 3.1)."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ...errors import PolicyError
from ...kernels._chunk_sets import fill_budget
from ...kernels._flat import host_bounds
from ...kernels.chunk_keys.api import chunk_bounds
from ...kernels.page_bounds.api import page_scores
from ...kernels.topk.api import topk
from ...types import HeadGrouping, KVView, Pooling, Selection
from ..chunking import cut
from ..history import TokenHistory
from ..scorers.page_bounds import PageBounds


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
    def without_text(self) -> int:
        """Tokens of a chunk where nobody knows what they say."""
        return min(max(self.page, self.shortest), self.longest)


@dataclass(slots=True)
class ChunkBounds:
    """Bounds of one layer's chunks, and on the host where they lie.

    Attributes:
        settings: sizes.
        history: what the tokens are, for cutting.
        bounds: of chunk i as of a page.
        edges: int32 `[B, C + 1]`, chunk i of a row has logical positions `edges[i]..edges[i + 1]`.
        counts: int32 `[B]`, chunks of each row.
        rows: the host's copy of each row's edges, the first 0; replaced, never changed in place.
    """

    settings: ChunkSettings
    history: TokenHistory
    bounds: PageBounds
    edges: Tensor
    counts: Tensor
    rows: list[array[int]]

    @classmethod
    def empty(cls, settings: ChunkSettings, history: TokenHistory, kv: KVView) -> ChunkBounds:
        """An index without chunks."""
        batch = kv.rows.batch
        room = kv.k.new_empty((batch, kv.kv_heads, 1, kv.head_dim))
        edges = torch.zeros((batch, 2), dtype=torch.int32, device=kv.k.device)
        rows = [array("i", [0]) for _ in range(batch)]
        return cls(settings, history, PageBounds(room, room.clone(), page=1), edges, edges[:, 0].clone(), rows)

    def update(self, kv: KVView, start: Tensor, count: int) -> None:
        """Cut what has become long enough; the last `count` tokens of every row are new or rewritten.

        Chunks whose end was decided by such a token go and are cut anew, so that no bound of a former key is left.
        """
        for row, (slot, length) in enumerate(host_bounds(kv.rows)):
            held = self.rows[row]
            settled = bisect_right(held, max(length - count, 0) - self.settings.longest, hi=len(held) - 1)
            edges = self._cut(row, slot, held[settled], min(length - 1, self.history.clean - slot))
            if len(edges) > 1:
                self._store(kv, row, settled, edges)
            if held[settled:].tolist() != edges:
                self.rows[row] = held[:settled] + array("i", edges)
                self.counts[row] = len(self.rows[row]) - 1

    def search(self, q: Tensor, kv: KVView) -> Selection:
        """The best chunks for queries `[B, Hq, d]` until the next does not fit, and everything behind the last one.

        All chunks of a row that the budget covers fit.
        """
        budget, lengths = self.settings.budget, kv.rows.seq_lens
        most = chosen = width = 1
        for edges, (_, length) in zip(self.rows, host_bounds(kv.rows), strict=True):
            always = length - edges[-1]
            room = max(budget - always, 0)
            most = max(most, len(edges) - 1)
            chosen = max(chosen, min(len(edges) - 1, room // self.settings.shortest))
            width = max(width, min(always + room, length))
        lower, upper = self.bounds.lower[:, :, :most], self.bounds.upper[:, :, :most]
        scores = page_scores(q, lower, upper, self.counts, page=1, pooling=self.settings.pooling)
        best, _ = topk(scores, self.counts, chosen, order="score")
        numbers = best.clamp(min=0).long()
        edges_of = self.edges[:, None].expand(-1, numbers.shape[1], -1)
        starts = edges_of.gather(-1, numbers).long()
        sizes = (edges_of.gather(-1, numbers + 1) - starts).masked_fill(best < 0, 0)
        tail = self.edges.gather(1, self.counts[:, None].long())[:, 0]
        head = torch.zeros_like(tail)
        return fill_budget(numbers, starts, sizes, lengths, head=head, tail=tail, budget=budget, width=width)

    def permute(self, rows: Tensor) -> None:
        self.bounds.permute(rows)
        self.edges, self.counts = self.edges.index_select(0, rows), self.counts.index_select(0, rows)
        self.rows = [self.rows[row] for row in rows.tolist()]

    def heads(self, start: int, stop: int) -> ChunkBounds:
        return replace(self, bounds=self.bounds.heads(start, stop))

    @property
    def nbytes(self) -> int:
        on_host = sum(edges.itemsize * len(edges) for edges in self.rows)
        return self.bounds.nbytes + self.edges.nbytes + self.counts.nbytes + on_host

    def _cut(self, row: int, slot: int, start: int, stop: int) -> list[int]:
        """Edges of the chunks that can be cut from positions `start..stop`, the first at `start`."""
        shortest, longest = self.settings.shortest, self.settings.longest
        levels = self.history.levels_of(row, slot + start, slot + stop) if stop - start >= longest else None
        if levels is not None:
            ends = list(accumulate(cut(levels, stop - start, shortest, longest), initial=start))
            # The last ones may have been cut for want of further tokens.
            return ends[: bisect_right(ends, stop - longest) + 1]
        # Some token is unknown: chunk by chunk, so that none depends on how many tokens are looked at together.
        edges = [start]
        while edges[-1] + longest <= stop:
            window = slot + edges[-1]
            levels = self.history.levels_of(row, window, window + longest)
            length = self.settings.without_text if levels is None else cut(levels, longest, shortest, longest)[0]
            edges.append(edges[-1] + length)
        return edges

    def _store(self, kv: KVView, row: int, first: int, edges: list[int]) -> None:
        """Compute the bounds of chunks between `edges`, the first of which is chunk number `first`."""
        stop = first + len(edges) - 1
        bounds = self.bounds
        bounds.reserve(stop)
        capacity = bounds.lower.shape[2]
        self.edges = torch.nn.functional.pad(self.edges, (0, capacity + 1 - self.edges.shape[1]))
        bounds.lower[row, :, first:stop], bounds.upper[row, :, first:stop] = chunk_bounds(kv, row, edges)
        self.edges[row, first : stop + 1] = torch.tensor(edges, dtype=torch.int32)
