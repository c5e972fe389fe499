"""The cluster index of one layer: which tokens are in which chunk, and when new ones are taken in."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...kernels._cluster_tree import ClusterTree, SearchWidths
from ...kernels._flat import host_bounds
from ...kernels.chunk_keys.api import chunk_keys
from ...kernels.cluster_search.api import cluster_search
from ...types import KVView, Selection
from ..chunking import cut
from ..history import TokenHistory
from .settings import ClusterSettings
from .tree import Grafts, graft, plant, ungraft

UNDONE = 32
"""So many of a row's latest chunks can be taken back without a rebuild: more than a draft of tokens spans."""


@dataclass(slots=True)
class _Row:
    """What the host knows of one row's chunks.

    Attributes:
        edges: logical positions between chunks; empty while the row is not indexed.
        planted: chunks that the k-means saw.
        seen: tokens that the build looked at, its tail included.
        short: chunks below the smallest length.
        units, clusters: how many there are.
        candidates: bound on the clusters that a search meets.
        grafts: how to take the latest chunks back; never changed in place.
    """

    edges: array[int] = field(default_factory=lambda: array("i"))
    planted: int = 0
    seen: int = 0
    short: int = 0
    units: int = 0
    clusters: int = 0
    candidates: int = 0
    grafts: Grafts | None = None

    @property
    def chunks(self) -> int:
        return max(len(self.edges) - 1, 0)

    @property
    def end(self) -> int:
        return self.edges[-1]

    @property
    def nbytes(self) -> int:
        return self.edges.itemsize * len(self.edges) + (0 if self.grafts is None else self.grafts.nbytes)

    def copy(self) -> _Row:
        return replace(self, edges=self.edges[:])


@dataclass(slots=True)
class ClusterIndex:
    """Chunks, clusters and units of one layer's rows; a row is indexed once it is longer than the budget.

    Attributes:
        settings: sizes and choices.
        history: what the tokens are, for cutting.
        tree: the index, padded to the largest row.
        rows: the host's share of it.
    """

    settings: ClusterSettings
    history: TokenHistory
    tree: ClusterTree
    rows: list[_Row]

    @classmethod
    def empty(cls, settings: ClusterSettings, history: TokenHistory, kv: KVView) -> ClusterIndex:
        """An index of no row yet."""
        batch, heads, device = kv.rows.batch, kv.kv_heads, kv.k.device

        def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros((batch, *sizes), dtype=dtype, device=device)

        tree = ClusterTree(
            unit_centroids=zeros(heads, 1, kv.head_dim, dtype=kv.k.dtype),
            unit_radii=zeros(heads, 1, dtype=torch.float32),
            unit_offsets=zeros(heads, 2),
            unit_tokens=zeros(heads, 1),
            unit_weights=zeros(heads, 1),
            centroids=zeros(heads, 1, kv.head_dim, dtype=kv.k.dtype),
            radii=zeros(heads, 1, dtype=torch.float32),
            numbers=zeros(heads, 1),
            offsets=zeros(heads, 2),
            members=zeros(heads, 1),
            edges=zeros(2),
            ends=zeros(),
        )
        return cls(settings, history, tree, [_Row() for _ in range(batch)])

    def update(self, kv: KVView, start: Tensor, count: int) -> None:
        """Index rows longer than the budget; the last `count` tokens of every row are new or rewritten.

        Chunks that reach into what is rewritten go. What stays is what a rebuild gives: the same k-means, then the
        later chunks that are left, one by one; nothing, if the k-means had looked at rewritten tokens.
        """
        for row, (slot, length) in enumerate(host_bounds(kv.rows)):
            self._forget(kv, row, max(length - count, 0))
            if length <= self.settings.budget:
                continue
            clean = min(length - 1, self.history.clean - slot)
            held = self.rows[row]
            if not held.edges:
                edges = self._cut(row, slot, self.settings.sinks, clean, length)
                if len(edges) > 1:
                    self._plant(kv, row, edges, clean)
            elif length - 1 - held.end >= self.settings.capacity:
                edges = self._cut(row, slot, held.end, clean, length)
                if len(edges) > 1:
                    self._graft(kv, row, edges)

    def search(self, q: Tensor, kv: KVView) -> Selection:
        """The set of every KV head for queries `[B, Hq, d]`."""
        lengths, told = kv.rows.seq_lens, self.settings
        return cluster_search(
            q, self.tree, lengths, budget=told.budget, sinks=told.sinks, units=told.k_g, widths=self._widths(kv)
        )

    def permute(self, rows: Tensor) -> None:
        self.tree = ClusterTree(**{name: tensor.index_select(0, rows) for name, tensor in self.tree.tensors().items()})
        self.rows = [self.rows[row].copy() for row in rows.tolist()]

    def heads(self, start: int, stop: int) -> ClusterIndex:
        if (start, stop) == (0, self.tree.radii.shape[1]):
            return self
        return replace(self, tree=self.tree.heads(start, stop))

    @property
    def nbytes(self) -> int:
        return self.tree.nbytes + sum(row.nbytes for row in self.rows)

    def _widths(self, kv: KVView) -> SearchWidths:
        settings = self.settings
        clusters = chunks = tokens = 1
        for held, (_, length) in zip(self.rows, host_bounds(kv.rows), strict=True):
            if length <= settings.budget or not held.edges:
                tokens = max(tokens, length)
                continue
            always = settings.sinks + length - held.end
            room = max(settings.budget - always, 0)
            tokens = max(tokens, always + room)
            chunks = max(chunks, min(held.chunks, room, held.short + room // settings.chunk_min))
            clusters = max(clusters, held.candidates)
        return SearchWidths(clusters, chunks, tokens)

    def _cut(self, row: int, slot: int, start: int, stop: int, length: int) -> list[int]:
        """Edges of the chunks that positions `start..stop` give, the first at `start`."""
        settings = self.settings
        if stop <= start:
            return [start]
        text = settings.chunking == "text"
        levels = self.history.levels_of(row, slot + start, slot + stop) if text else None
        lengths = cut(levels, stop - start, settings.chunk_min, settings.chunk_max)
        edges = list(accumulate(lengths, initial=start))
        if edges[-1] < stop and length - 1 - edges[-1] >= settings.capacity:
            edges.append(stop)
        return edges

    def _plant(self, kv: KVView, row: int, edges: list[int], seen: int) -> None:
        """Build the row's tree from scratch."""
        keys = chunk_keys(kv, row, edges, pooling=self.settings.pooling)
        tree = plant(keys, edges, self.settings, kv.k.dtype)
        units, clusters = tree.unit_tokens.shape[2], tree.radii.shape[2]
        self._reserve(units, clusters, len(edges) - 1)
        for name, held in self.tree.tensors().items():
            own = getattr(tree, name)[0]
            target = held[row]
            # Rows are padded by what makes absent units and clusters empty.
            target.copy_(own[..., -1:] if "offsets" in name else torch.zeros_like(target))
            for size, dim in zip(own.shape, range(own.dim()), strict=True):
                target = target.narrow(dim, 0, size)
            target.copy_(own)
        self.rows[row] = _Row(
            edges=array("i", edges),
            planted=len(edges) - 1,
            seen=seen,
            short=self._short(edges),
            units=units,
            clusters=clusters,
            candidates=self._candidates(tree),
        )

    def _graft(self, kv: KVView, row: int, edges: list[int]) -> None:
        """Take in further chunks, the first of which starts where the last one ends."""
        held = self.rows[row]
        keys = chunk_keys(kv, row, edges, pooling=self.settings.pooling)
        first, count = held.chunks, len(edges) - 1
        self._reserve(0, 0, first + count)
        lengths = [stop - start for start, stop in pairwise(edges)]
        members, grafts = graft(self._own(row), keys, lengths, first)
        held.grafts = (grafts if held.grafts is None else Grafts.joined((held.grafts, grafts))).last(UNDONE)
        self.tree.members[row, :, : first + count] = members
        positions = torch.tensor(edges, dtype=torch.int32, device=keys.device)
        self.tree.edges[row, first : first + count + 1] = positions
        self.tree.ends[row] = positions[-1]
        held.edges.extend(edges[1:])
        held.short += self._short(edges)

    def _forget(self, kv: KVView, row: int, kept: int) -> None:
        """Take the row back to its first `kept` tokens."""
        held = self.rows[row]
        if not held.edges or kept >= max(held.end, held.seen):
            return
        if kept < held.seen:
            self.rows[row] = _Row()
            self.tree.ends[row] = 0
            self.tree.unit_tokens[row] = 0
            return
        edges = held.edges[: bisect_right(held.edges, kept)].tolist()
        gone = held.edges[len(edges) - 1 :].tolist()
        if held.grafts is not None and len(gone) - 1 <= held.grafts.count:
            self._ungraft(row, held.grafts, gone)
            return
        self._plant(kv, row, edges[: held.planted + 1], held.seen)
        if len(edges) > held.planted + 1:
            self._graft(kv, row, edges[held.planted :])

    def _ungraft(self, row: int, grafts: Grafts, edges: list[int]) -> None:
        """Take the latest chunks back, those between `edges`."""
        held, count = self.rows[row], len(edges) - 1
        first, stays = held.chunks - count, grafts.count - count
        lengths = [stop - start for start, stop in pairwise(edges)]
        self.tree.members[row, :, :first] = ungraft(self._own(row), grafts.last(count), lengths, first)
        self.tree.ends[row] = edges[0]
        held.grafts = grafts.first(stays) if stays > 0 else None
        held.short -= self._short(edges)
        del held.edges[first + 1 :]

    def _own(self, row: int) -> ClusterTree:
        """The tree of one row without its padding; shares memory."""
        held = self.rows[row]
        one = slice(row, row + 1)
        sizes = {"unit": held.units, "members": held.chunks, "edges": held.chunks + 1}
        own = {}
        for name, tensor in self.tree.tensors().items():
            size = sizes.get(name.partition("_")[0], held.clusters) + ("offsets" in name)
            own[name] = (
                tensor[one] if name == "ends" else tensor[one, :size] if name == "edges" else tensor[one, :, :size]
            )
        return ClusterTree(**own)

    def _short(self, edges: list[int]) -> int:
        return sum(stop - start < self.settings.chunk_min for start, stop in pairwise(edges))

    def _candidates(self, tree: ClusterTree) -> int:
        """The most clusters that a search of a fresh tree can keep; later chunks only make it fewer.

        By tokens, all kept units but the last hold less than 4 budgets. The densest units first give the most.
        """
        sizes, tokens = tree.unit_offsets[0].diff(dim=1).cpu(), tree.unit_tokens[0].cpu()
        if self.settings.k_g is not None:
            return int(sizes.sort(dim=1, descending=True).values[:, : self.settings.k_g].sum(dim=1).max())
        order = (sizes / tokens).sort(dim=1, descending=True).indices
        sizes, tokens = sizes.gather(1, order), tokens.gather(1, order)
        inside = tokens.cumsum(1) - tokens < 4 * self.settings.budget
        most = (sizes * inside).sum(dim=1) + sizes.amax(dim=1)
        return min(int(most.max()), tree.radii.shape[2])

    def _reserve(self, units: int, clusters: int, chunks: int) -> None:
        """Make room; chunks, of which more come, by an eighth more than asked for."""
        tree = self.tree
        if chunks > tree.members.shape[2]:
            chunks += max(chunks // 8, 16)
        extra = {
            "unit": units - tree.unit_tokens.shape[2],
            "members": chunks - tree.members.shape[2],
            "edges": chunks - tree.members.shape[2],
            "ends": 0,
        }
        grown = {
            name: _padded(tensor, extra.get(name.partition("_")[0], clusters - tree.radii.shape[2]), name)
            for name, tensor in tree.tensors().items()
        }
        self.tree = ClusterTree(**grown)


def _padded(tensor: Tensor, extra: int, name: str) -> Tensor:
    """The tensor with `extra` more units, clusters or chunks, empty ones."""
    if extra <= 0:
        return tensor
    dim = 1 if name == "edges" else 2
    last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
    room = last if "offsets" in name else torch.zeros_like(last)
    return torch.cat((tensor, room.expand(*(extra if at == dim else -1 for at in range(tensor.dim())))), dim=dim)
