"""Quest's bounds over chunks cut where the text breaks (the pilot study of LycheeCluster, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.chunked import ChunkedIndex, ChunkedLayer
from saccade.errors import PolicyError
from saccade.kernels._gather import gather_tokens
from saccade.kernels.page_bounds.api import page_scores
from saccade.kernels.topk.api import topk
from saccade.methods.method import Method
from saccade.methods.method import every_layer as plan
from saccade.methods.options import DEFAULT_BUDGET, AtLeastOne, Budget, FirstDense, Options
from saccade.selection.clusters.search import fill_budget
from saccade.selection.index import Index, SlotSizes
from saccade.selection.selector import Selector
from saccade.text.feed import TokenFeed
from saccade.text.table import Cuts
from saccade.types import KVView, Selection


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least and greatest keys `[Hkv, C, d]` of one sequence's chunks."""

    lower: Tensor
    upper: Tensor

    @property
    def nbytes(self) -> int:
        return self.lower.nbytes + self.upper.nbytes


class ChunkBounds(ChunkedLayer[Bounds]):
    """Bounds of one layer's chunks, each as if it were a page."""

    settings: TextPages

    def planted(self, slot: int, kv: KVView, edges: Tensor, text: TokenFeed | None) -> Bounds:
        positions = edges[:-1, None] + torch.arange(self.settings.chunk_max, device=edges.device)
        keys = gather_tokens(kv.k, kv.k_scale, kv.rows, positions.flatten()[None])[0].unflatten(0, positions.shape)
        outside = (positions >= edges[1:, None])[..., None, None]
        extremes = keys.masked_fill(outside, torch.inf).amin(1), keys.masked_fill(outside, -torch.inf).amax(1)
        return Bounds(*(one.transpose(0, 1).to(kv.k.dtype).contiguous() for one in extremes))

    def narrowed(self, held: Bounds, start: int, stop: int) -> Bounds:
        return Bounds(held.lower[start:stop], held.upper[start:stop])

    def search(self, q: Tensor, kv: KVView) -> Selection:
        table, budget, lengths = self.owner.table, self.settings.budget, kv.rows.seq_lens
        slots = torch.tensor(self.owner.slots_of(kv.rows.batch), device=lengths.device)
        counts, ends = table.counts[slots], table.ends[slots]
        most = max(int(counts.max()), 1)
        lower, upper = kv.k.new_zeros((2, kv.rows.batch, kv.kv_heads, most, kv.head_dim))
        for row, slot in enumerate(slots.tolist()):
            if (held := self.held[slot]) is not None:
                lower[row, :, : held.lower.shape[1]], upper[row, :, : held.upper.shape[1]] = held.lower, held.upper
        bounds, _ = page_scores(q, lower, upper, counts, page=1, pooling="max")
        best, _ = topk(bounds, counts, min(bounds.shape[-1], budget // self.settings.chunk_min), order="score")
        numbers, edges = best.clamp(min=0).long(), table.edges[slots][:, None].expand(-1, kv.kv_heads, -1)
        starts = edges.gather(-1, numbers).long()
        sizes = (edges.gather(-1, numbers + 1) - starts).masked_fill(best < 0, 0)
        none, width = torch.zeros_like(lengths), max(budget, int((lengths - ends).max()))
        return fill_budget(numbers, starts, sizes, lengths, head=none, tail=ends, budget=budget, width=width)


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

    def new_slots(self, sizes: SlotSizes) -> ChunkedIndex | None:
        return None if sizes.fixed else ChunkedIndex(self, Cuts(0, self.chunk_min, self.chunk_max), ChunkBounds, sizes)

    def stop(self, length: int, clean: int) -> int:
        return max(clean, 0)

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        assert isinstance(index, ChunkBounds), "chunks are scored from their own index"
        return index.search(q, kv)

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
