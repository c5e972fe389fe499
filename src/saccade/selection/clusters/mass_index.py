"""The index of attention mass: clusters of items, each group planted anew when its items have changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels._mass_tree import ChunkMeans, MassSettings, MassTree
from ...kernels.chunk_keys.api import token_keys
from ...kernels.cluster_mass.api import cluster_mass
from ...text.table import ChunkTable
from ...types import Intake, KVView
from ..index import SlotSizes, Views
from .mass_plant import Means, PlantedMass, plant_mass
from .runs import Runs, chunk_runs, token_runs
from .settings import ClusterSettings
from .token_settings import TokenSettings

TOGETHER = 2**17
"""Tokens of all heads that are planted together: a kilobyte each meanwhile, and fewer leave a device idle."""
ITERATIONS = 4
"""Of k-means: more change nothing that was measured."""


class MassIndex:
    """Trees of S slots in L layers: of single tokens, or of the chunks of a table.

    What is in a slot is a function of its clean tokens and their number alone: every group is planted from its own
    keys. So nothing drifts, what is taken back leaves no trace, and it does not matter in which calls the tokens came.

    Attributes:
        settings: sizes and choices.
        trees: of all layers, `[L, R, H, ...]`; replaced when they grow, which fixed ones do not.
        layers: each layer's part of it.
        table: where the text is cut, S rows; None: single tokens.
        placed: slots of the steps' rows, int32 `[B]`.
    """

    def __init__(self, settings: TokenSettings | ClusterSettings, sizes: SlotSizes) -> None:
        self.settings, keys = settings, sizes.keys
        self._numbers = {layer: number for number, layer in enumerate(sizes.layers)}
        groups, outer = settings.groups(sizes.longest), (len(self._numbers), sizes.slots, keys.heads)
        clusters, items = groups * settings.clusters, groups * settings.items

        def zeros(*inner: int, dtype: torch.dtype, outer: tuple[int, ...] = outer) -> Tensor:
            return torch.zeros((*outer, *inner), dtype=dtype, device=keys.device)

        self.table, chunks, ends = None, None, zeros(dtype=torch.int32, outer=(sizes.slots,))
        if isinstance(settings, ClusterSettings):
            self.table = ChunkTable(settings.cuts, sizes.text, sizes.slots, items, keys.device)
            chunks, ends = (
                ChunkMeans(
                    means=zeros(items, keys.head_dim, dtype=keys.dtype),
                    spreads=zeros(items, dtype=torch.float32),
                    edges=self.table.edges,
                    owners=zeros(groups * settings.tokens + 1, dtype=torch.int32, outer=(sizes.slots,)),
                    counts=self.table.counts,
                ),
                self.table.ends,
            )
        self._lay_out(
            MassTree(
                means=zeros(clusters, keys.head_dim, dtype=keys.dtype),
                spreads=zeros(clusters, dtype=torch.float32),
                sizes=zeros(clusters, dtype=torch.int32),
                labels=zeros(items, dtype=torch.int16),
                ends=ends,
                items=settings.items,
                clusters=settings.clusters,
                chunks=chunks,
            )
        )

    def take_in(self, new: Sequence[Intake], views: Views) -> None:
        first, heads = self._numbers[views.layers[0]], self.trees.sizes.shape[2]
        assert self._numbers[views.layers[-1]] - first == len(views.layers) - 1, "layers are neighbours in the trees"
        if self.table is not None:
            self.table.take_in(new)
        for tokens, runs in self._runs(new):
            if runs.owners is not None:
                self._own(runs)
            together = max(TOGETHER // (heads * tokens), 1)
            for start in range(0, len(runs.on_host), together):
                part = runs.part(start, start + together)
                seen, step = views.of(part.on_host), max(together // len(part.on_host), 1)
                for layer in range(0, len(views.layers), step):
                    kvs = [seen[one] for one in views.layers[layer : layer + step]]
                    self._plant(first + layer, kvs, part, tokens)
        if self.table is None:
            told = torch.tensor([(one.slot, one.stop) for one in new], device="cpu")
            slots, stops = told.to(self.trees.ends.device, non_blocking=True).unbind(1)
            self.trees.ends.index_copy_(0, slots, stops.int())

    def place(self, slots: Sequence[int], on_device: Tensor) -> None:
        self.placed = on_device

    def grow(self, slots: int, longest: int) -> None:
        have, groups = self.trees.sizes.shape[1], self.settings.groups(longest)
        held = self.trees.labels.shape[3] // self.settings.items
        if slots > have or groups > held:
            grown = torch.arange(max(slots, have), device=self.trees.ends.device).clamp(max=have)
            # An eighth more, so that it does not move with every group.
            self._arrange(grown, max(groups + groups // 8, held))

    def clear(self, slot: int) -> None:
        if self.table is not None:
            self.table.clear(slot)
        # A cluster without tokens is none, whatever else is left of it.
        for held in (self.trees.ends[slot], self.trees.sizes[:, slot]):
            held.fill_(0)

    def permute(self, rows: Tensor) -> None:
        self._arrange(rows, self.trees.labels.shape[3] // self.settings.items)

    @property
    def nbytes(self) -> int:
        return self.trees.nbytes

    def _runs(self, new: Sequence[Intake]) -> Iterator[tuple[int, Runs]]:
        """Groups that are to be planted, and how many tokens each of them has at most."""
        settings = self.settings
        if isinstance(settings, TokenSettings):
            yield from token_runs(settings, new, self.trees.ends.device)
            return
        assert self.table is not None, "chunks are cut by it"
        held = self.trees.labels.shape[3] // settings.items
        # As much is planted of each slot as of the one that brings most.
        yield settings.tokens, chunk_runs(settings, self.table, new, held)

    def _own(self, runs: Runs) -> None:
        """Note the chunk of each token."""
        assert runs.owners is not None and self.trees.chunks is not None, "there are chunks"
        target, places = self.trees.chunks.owners, runs.owners.shape[1]
        position = runs.begin[:, None] + torch.arange(places, device=target.device)
        # What is behind the last chunk goes into a column of nobody.
        at = torch.where(position < runs.end[:, None], position, target.shape[1] - 1)
        target[runs.slots[:, None], at] = (runs.owners + runs.first[:, None]).int()

    def _arrange(self, slots: Tensor, groups: int) -> None:
        """Slot `i` is what slot `slots[i]` was, empty if there was none, with room for so many groups."""
        trees, settings = self.trees, self.settings
        more = groups - trees.labels.shape[3] // settings.items

        def moved(held: Tensor, places: int, dim: int = 1) -> Tensor:
            inner = (0, 0) * (held.dim() - dim - (3 if dim else 2))
            outer = (0, 0) if dim else ()
            return pad(held, (*inner, 0, more * places, *outer, 0, 1)).index_select(dim, slots)

        chunks, ends = trees.chunks, pad(trees.ends, (0, 1)).index_select(0, slots)
        if chunks is not None and self.table is not None:
            self.table.arrange(slots, groups * settings.items)
            ends = self.table.ends
            chunks = replace(
                chunks,
                means=moved(chunks.means, settings.items),
                spreads=moved(chunks.spreads, settings.items),
                edges=self.table.edges,
                owners=moved(chunks.owners, settings.tokens, 0),
                counts=self.table.counts,
            )
        self._lay_out(
            replace(
                trees,
                means=moved(trees.means, settings.clusters),
                spreads=moved(trees.spreads, settings.clusters),
                sizes=moved(trees.sizes, settings.clusters),
                labels=moved(trees.labels, settings.items),
                ends=ends,
                chunks=chunks,
            )
        )

    def _lay_out(self, trees: MassTree) -> None:
        layers = {layer: MassLayer(self, _of_layer(trees, number)) for layer, number in self._numbers.items()}
        placed = torch.arange(len(trees.ends), dtype=torch.int32, device=trees.ends.device)
        # All at once: who was interrupted lays out again.
        self.trees, self.layers, self.placed = trees, layers, placed

    def _plant(self, first: int, kvs: Sequence[KVView], runs: Runs, tokens: int) -> None:
        """Plant the groups of some layers, from number `first` on."""
        layers, heads, owners = len(kvs), self.trees.sizes.shape[2], runs.owners
        keys = token_keys(kvs, runs.begin, tokens, runs.end)

        def of_problems(told: Tensor) -> Tensor:
            return told[:, None].expand(layers, -1, heads, *told.shape[1:]).flatten(0, 2)

        items = tokens if owners is None else self.settings.items
        planted = plant_mass(
            keys.flatten(0, 2),
            None if owners is None else of_problems(owners),
            items,
            of_problems(runs.counts),
            -(-items // self.settings.cluster_size),
            of_problems(runs.made),
            ITERATIONS,
        )
        self._write(slice(first, first + layers), runs, planted)

    def _write(self, layers: slice, runs: Runs, planted: PlantedMass) -> None:
        trees, settings, heads = self.trees, self.settings, self.trees.sizes.shape[2]

        def shaped(values: Tensor) -> Tensor:
            by_layer: Tensor = values.unflatten(0, (layers.stop - layers.start, -1, heads))
            return by_layer

        # A block's clusters are numbered among those of its group.
        labels = shaped(planted.labels) + (runs.clusters % settings.clusters)[:, None, None]
        if trees.chunks is None:
            # Sinks are no items: those behind them move up.
            moved = torch.arange(labels.shape[3], device=labels.device) - (runs.begin - runs.first)[:, None]
            labels = labels.gather(3, moved.clamp(min=0)[:, None].expand_as(labels))
        else:
            assert planted.chunks is not None, "they are the items"
            _put_means((trees.chunks.means, trees.chunks.spreads), planted.chunks, layers, runs.slots, runs.first)
        _put(trees.labels[layers], labels, runs.slots, runs.first)
        _put_means((trees.means, trees.spreads), planted.clusters, layers, runs.slots, runs.clusters)
        _put(trees.sizes[layers], shaped(planted.clusters.sizes), runs.slots, runs.clusters)


def _put_means(target: tuple[Tensor, Tensor], found: Means, layers: slice, slots: Tensor, start: Tensor) -> None:
    """Means and spreads of planted groups into those layers."""
    for held, values in zip(target, (found.means, found.spreads), strict=True):
        part = held[layers]
        _put(part, values.unflatten(0, (len(part), -1, part.shape[2])), slots, start)


def _put(target: Tensor, values: Tensor, slots: Tensor, start: Tensor) -> None:
    """Write `[L, n, H, w, ...]` into the slots of `[L, R, H, N, ...]` from a place on."""
    width = values.shape[3]
    if slots.is_cpu:
        # Several times as fast as an index.
        for number, (slot, place) in enumerate(zip(slots.tolist(), start.tolist(), strict=True)):
            target[:, slot, :, place : place + width] = values[:, number]
        return
    head = torch.arange(target.shape[2], device=target.device)[:, None]
    at = (start[:, None] + torch.arange(width, device=target.device))[:, None]
    target[:, slots[:, None, None], head, at] = values.to(target.dtype)


def _of_layer(trees: MassTree, number: int) -> MassTree:
    """The tree of one; shares memory."""
    chunks = trees.chunks
    if chunks is not None:
        chunks = replace(chunks, means=chunks.means[number], spreads=chunks.spreads[number])
    return replace(
        trees,
        means=trees.means[number],
        spreads=trees.spreads[number],
        sizes=trees.sizes[number],
        labels=trees.labels[number],
        chunks=chunks,
    )


@dataclass(frozen=True, slots=True, eq=False)
class MassLayer:
    """One layer's part of an index of attention mass: its tree, of all KV heads or of some."""

    owner: MassIndex
    tree: MassTree

    def scores(self, q: Tensor, kv: KVView, scale: float, *, each: bool) -> Tensor:
        """Of every token, float32 `[B, G, max_len]`, +inf of those that are always attended to."""
        settings, rows = self.owner.settings, kv.rows
        how = MassSettings(rows.max_len, settings.sinks, scale, settings.spread, each, settings.reach)
        return cluster_mass(q, self.tree, self.owner.placed, rows.seq_lens, how)

    def heads(self, start: int, stop: int) -> MassLayer:
        if (start, stop) == (0, self.tree.sizes.shape[1]):
            return self
        return MassLayer(self.owner, self.tree.heads(start, stop))
