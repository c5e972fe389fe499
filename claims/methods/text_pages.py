"""Quest's bounds over chunks cut where the text breaks (the pilot study of LycheeCluster, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import PolicyError
from saccade.kernels._chunk_sets import fill_budget
from saccade.kernels._gather import gather_tokens
from saccade.kernels.page_bounds.api import page_scores
from saccade.kernels.topk.api import topk
from saccade.methods.lychee_cluster import plan
from saccade.methods.method import Method
from saccade.methods.options import DEFAULT_BUDGET, AtLeastOne, Budget, FirstDense, Options
from saccade.selection.chunk_table import ChunkTable, Cuts
from saccade.selection.history import TokenHistory
from saccade.selection.scorers.page_bounds import PageBounds
from saccade.selection.selector import Index, NewTokens, Selector
from saccade.types import KVView, Selection


@dataclass(slots=True, kw_only=True)
class ChunkBounds(PageBounds):
    """Bounds `[B, Hkv, C, d]` of one layer's chunks, each as if it were a page."""

    chunks: ChunkTable
    history: TokenHistory
    version: int = -1

    def update(self, kv: KVView, new: NewTokens) -> None:
        self.history.follow(self.chunks, new.rows, new.count, lambda length, clean: max(clean, 0))
        if self.version == self.chunks.version:
            return
        edges = self.chunks.edges[:, : max(int(self.chunks.counts.max()), 1) + 1, None]
        positions = edges[:, :-1] + torch.arange(self.chunks.cuts.longest, device=edges.device)
        keys = gather_tokens(kv.k, kv.k_scale, kv.rows, positions.flatten(1)).unflatten(1, positions.shape[1:])
        outside = (positions >= edges[:, 1:])[..., None, None]
        extremes = keys.masked_fill(outside, torch.inf).amin(2), keys.masked_fill(outside, -torch.inf).amax(2)
        self.lower, self.upper = (one.transpose(1, 2).to(kv.k.dtype).contiguous() for one in extremes)
        self.version = self.chunks.version


@dataclass(frozen=True)
class TextPages(Selector):
    """The chunks whose bounds promise the largest q·k while they fit, what is in none yet, and the current token."""

    budget: int
    chunk_min: int
    chunk_max: int
    owns_index = True
    reads_text = True

    def __post_init__(self) -> None:
        if not self.chunk_min <= self.chunk_max < self.budget:
            told = f"chunk_min={self.chunk_min}, chunk_max={self.chunk_max} and budget={self.budget}"
            raise PolicyError(f"{told} do not ascend: chunk_min <= chunk_max < budget is valid")

    def new_index(self, kv: KVView, history: TokenHistory) -> ChunkBounds:
        chunks = history.chunks(Cuts(0, self.chunk_min, self.chunk_max), kv, text=True)
        none = kv.k.new_empty((kv.rows.batch, kv.kv_heads, 1, kv.head_dim))
        return ChunkBounds(none, none, 1, chunks=chunks, history=history)

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        assert isinstance(index, ChunkBounds), "chunks are scored from their own index"
        table, lengths, budget = index.chunks, kv.rows.seq_lens, self.budget
        bounds = page_scores(q, index.lower, index.upper, table.counts, page=1, pooling="max")
        best, _ = topk(bounds, table.counts, min(bounds.shape[-1], budget // self.chunk_min), order="score")
        numbers, edges = best.clamp(min=0).long(), table.edges[:, None].expand(-1, kv.kv_heads, -1)
        starts = edges.gather(-1, numbers).long()
        sizes = (edges.gather(-1, numbers + 1) - starts).masked_fill(best < 0, 0)
        none, width = torch.zeros_like(lengths), max(budget, int((lengths - table.ends).max()))
        return fill_budget(numbers, starts, sizes, lengths, head=none, tail=table.ends, budget=budget, width=width)

    def size(self, length: int) -> int:
        return min(length, self.budget)


class TextPagesOptions(Options):
    """Options of `text_pages`: on average chunks are as long as Quest's pages."""

    budget: Budget = DEFAULT_BUDGET
    chunk_min: AtLeastOne = 8
    """fewest tokens of a chunk"""
    chunk_max: AtLeastOne = 20
    """most tokens of a chunk"""
    dense_layers: FirstDense = None

    @property
    def selector(self) -> TextPages:
        return TextPages(self.budget, self.chunk_min, self.chunk_max)


SOURCE = "LycheeCluster, arXiv 2603.08453"
METHOD = Method("text_pages", "chunks of text by bounds", SOURCE, TextPagesOptions, plan, compared=False, tuned=())
