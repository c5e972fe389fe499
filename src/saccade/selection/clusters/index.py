"""The cluster index: groups of chunks, each planted anew when its chunks have changed, of many slots and layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from ...kernels._flat import host_bounds
from ...kernels.chunk_keys.api import chunk_keys
from ...text.table import ChunkTable
from ...types import Intake, KVView, Rows, Selection
from ..index import SlotSizes, Views
from .groups import Groups, touched
from .plant import plant
from .search import SearchWidths, cluster_search
from .settings import ClusterSettings
from .tree import ClusterTree, arranged, empty_trees, groups_of, of_layer, write

TOGETHER = 1024
"""Groups of a head that are planted together: each needs half a megabyte meanwhile, and fewer leave a device idle."""


class ClusterIndex:
    """Trees of S slots in L layers.

    What is in a slot is a function of its clean tokens and its length alone: chunk i lies in group i // places, every
    group is planted from its own chunks, and the text is looked at as far as whole buffers reach. So nothing drifts,
    what is taken back leaves no trace, and it does not matter in which calls the tokens came.

    Attributes:
        settings: sizes and choices.
        table: where the text is cut, S rows.
        trees: of all layers; replaced when they grow, which `fixed` ones do not.
        layers: each layer's part of it.
        placed: slots of the steps' rows, on the host and as int32 `[B]`; None: all, in order.
        fixed: whether searches must not depend on lengths; rows that a set of the budget's size does not hold are then
            none of this index's.
    """

    def __init__(self, settings: ClusterSettings, sizes: SlotSizes) -> None:
        self.settings, self.fixed, keys = settings, sizes.fixed, sizes.keys
        groups = settings.groups(sizes.longest)
        self.table = ChunkTable(settings.cuts, sizes.text, sizes.slots, groups * settings.replant, keys.device)
        self.placed: tuple[Sequence[int], Tensor] | None = None
        self._numbers = {layer: number for number, layer in enumerate(sizes.layers)}
        self._lay_out(empty_trees(settings, keys, len(self._numbers), self.table.edges, self.table.ends, groups))

    def take_in(self, new: Sequence[Intake], views: Views) -> None:
        self.table.take_in(new)
        # As much is planted of each slot as of the one that brings most.
        most, heads = self.settings.touched, self.trees.radii.shape[2]
        for groups, some in groupby(sorted(new, key=most), most):
            alike = [*some]
            # So many slots together that the groups of a layer are not too many at once.
            together = max(TOGETHER // (min(groups, groups_of(self.trees, self.settings)) * heads), 1)
            for start in range(0, len(alike), together):
                self._plant(alike[start : start + together], views)

    def place(self, slots: Sequence[int], on_device: Tensor) -> None:
        self.placed = slots, on_device

    def grow(self, slots: int, longest: int) -> None:
        have, groups = self.trees.radii.shape[1], self.settings.groups(longest)
        if slots > have or groups > groups_of(self.trees, self.settings):
            grown = torch.arange(max(slots, have), device=self.table.edges.device).clamp(max=have)
            # An eighth more, so that it does not move with every group.
            self._arrange(grown, groups + groups // 8)

    def clear(self, slot: int) -> None:
        self.table.clear(slot)
        # A unit without tokens is none, whatever else is left of it.
        self.trees.unit_tokens[:, slot].fill_(0)

    def permute(self, rows: Tensor) -> None:
        self._arrange(rows, 0)

    @property
    def nbytes(self) -> int:
        return self.trees.nbytes + self.table.counts.nbytes

    def _arrange(self, slots: Tensor, groups: int) -> None:
        self.table.arrange(slots, groups * self.settings.replant)
        self._lay_out(arranged(self.trees, self.settings, slots, groups))

    def _lay_out(self, trees: ClusterTree) -> None:
        trees = replace(trees, edges=self.table.edges, ends=self.table.ends)
        layers = {layer: ClusterLayer(self, of_layer(trees, number)) for layer, number in self._numbers.items()}
        # Both at once: who was interrupted lays out again.
        self.trees, self.layers = trees, layers

    def _plant(self, new: Sequence[Intake], views: Views) -> None:
        """Plant the groups in which some chunks are new, some layers at a time."""
        settings, seen = self.settings, views.of([one.slot for one in new])
        first, kvs = self._numbers[views.layers[0]], [seen[layer] for layer in views.layers]
        last = self._numbers[views.layers[-1]]
        assert last - first == len(kvs) - 1, "layers are neighbours in the trees"
        groups = Groups.of(settings, *touched(settings, self.table, new, groups_of(self.trees, settings)))
        step = max(TOGETHER // (groups.numbers.numel() * self.trees.radii.shape[2]), 1)
        for start in range(0, len(kvs), step):
            some = kvs[start : start + step]
            keys = chunk_keys(some, groups.edges, longest=settings.chunk_max, pooling=settings.pooling)
            planted = plant(keys, groups, settings, self.trees.centroids.dtype)
            write(self.trees, first + start, settings, planted, groups)


@dataclass(frozen=True, slots=True, eq=False)
class ClusterLayer:
    """One layer's part of a cluster index: its tree, of all KV heads or of some."""

    owner: ClusterIndex
    tree: ClusterTree

    @property
    def settings(self) -> ClusterSettings:
        return self.owner.settings

    def search(self, q: Tensor, kv: KVView) -> Selection:
        settings, placed = self.settings, self.owner.placed
        return cluster_search(
            q,
            self.tree,
            kv.rows.seq_lens,
            budget=settings.budget,
            sinks=settings.sinks,
            widths=self._widths(kv.rows),
            slots=None if placed is None else placed[1],
        )

    def heads(self, start: int, stop: int) -> ClusterLayer:
        if (start, stop) == (0, self.tree.radii.shape[1]):
            return self
        return ClusterLayer(self.owner, self.tree.heads(start, stop))

    def _widths(self, rows: Rows) -> SearchWidths:
        """Bounds that follow from the settings and, for a row of which too little is clean, from its length."""
        owner, settings, stops = self.owner, self.settings, self.owner.table.stops
        tokens = settings.budget
        if not owner.fixed:
            slots = range(rows.batch) if owner.placed is None else owner.placed[0]
            for slot, (_, length) in zip(slots, host_bounds(rows), strict=True):
                tokens = max(tokens, settings.always(length, stops[slot]) if length > settings.budget else 1)
        units = 4 * settings.budget // settings.chunk_min + 1
        return SearchWidths(
            clusters=units + settings.clusters,
            chunks=max(settings.budget // settings.chunk_min, 1),
            tokens=tokens,
        )
