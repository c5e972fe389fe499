"""Page bounds: an upper bound on q·k of a page from its keys' elementwise minimum and maximum (Quest, ReSA)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.page_bounds.api import page_scores, update_page_bounds
from ...types import KVView, Pooling
from ..costs import Bytes
from ..index import Index, NewTokens
from ..selector import Scorer


@dataclass(slots=True)
class PageBounds:
    """Bounds of one layer's pages, which start at logical position 0.

    Attributes:
        lower, upper: `[B, Hkv, P, d]` in the cache's dtype, which holds them exactly, P growing with the cache; with a
            table `[blocks, Hkv, P, d]` by strides, borrowed like the cache whose blocks they follow: only searched.
        page: tokens per page.
        table: int32 `[B, n]`, blocks of each row: page p of row b lies at `[table[b, p // P], :, p % P]`. None: block b
            is all of row b.
        fills: whether pages that rows' latest tokens have filled are bounded when pages are scored.
    """

    lower: Tensor
    upper: Tensor
    page: int
    table: Tensor | None = None
    fills: bool = False

    def update(self, kv: KVView, new: NewTokens) -> None:
        # One more: they wait until the next page is full.
        held, pages = self.lower.shape[2], -(-kv.rows.max_len // self.page) + 1
        if pages > held:
            extra = max(pages - held, held // 8, 16)
            room = self.lower.new_empty((*self.lower.shape[:2], extra, self.lower.shape[3]))
            self.lower = torch.cat((self.lower, room), dim=2)
            self.upper = torch.cat((self.upper, room), dim=2)
        update_page_bounds(self.lower, self.upper, kv, page=self.page, start=new.start, count=new.count)

    def permute(self, rows: Tensor) -> None:
        self.lower, self.upper = self.lower.index_select(0, rows), self.upper.index_select(0, rows)

    def heads(self, start: int, stop: int) -> PageBounds:
        if (start, stop) == (0, self.lower.shape[1]):
            return self
        return replace(self, lower=self.lower[:, start:stop], upper=self.upper[:, start:stop])

    @property
    def nbytes(self) -> int:
        return self.lower.nbytes + self.upper.nbytes


@dataclass(frozen=True, slots=True)
class PageBoundScorer(Scorer):
    """Scores pages of `unit` tokens by sum_j max(q_j * min_j, q_j * max_j)."""

    unit: int
    pooling: Pooling = "max"

    @property
    def bounds_page(self) -> int | None:
        return self.unit

    def new_index(self, kv: KVView) -> PageBounds:
        empty = kv.k.new_empty((kv.rows.batch, kv.kv_heads, 0, kv.head_dim))
        return PageBounds(empty, empty.clone(), self.unit)

    def score(self, q: Tensor, kv: KVView, index: Index | None, stored: Tensor | None = None) -> Tensor:
        return self.tiled(q, kv, index, stored)[0]

    def tiled(
        self, q: Tensor, kv: KVView, index: Index | None, stored: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert stored is None, "bounds are not made of token scores: `fused` says so"
        assert isinstance(index, PageBounds), "page bounds are scored from their own index"
        pages = -(-kv.rows.max_len // self.unit)
        return page_scores(
            q,
            index.lower,
            index.upper,
            kv.rows.seq_lens,
            page=self.unit,
            pooling=self.pooling,
            table=index.table,
            pages=pages,
            k_scale=kv.k_scale,
            filling=kv if index.fills else None,
        )

    def traffic(self, length: int, head_dim: int, itemsize: float) -> Bytes:
        """Both bounds of every page."""
        return Bytes(read=2 * -(-length // self.unit) * head_dim * itemsize)

    def upkeep(self, length: int, appended: int, rewritten: int, head_dim: int, itemsize: float) -> Bytes:
        """Keys of the touched pages are read whole, their bounds written; how many varies, this is the mean."""
        touched = 1 + (appended + rewritten - 1) / self.unit
        return Bytes(touched * self.unit * head_dim * itemsize, touched * 2 * head_dim * itemsize)
