"""The cluster index: groups of chunks, each planted anew when its chunks have changed, of many slots and layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels._cluster_tree import ClusterTree, SearchWidths
from ...kernels._flat import host_bounds
from ...kernels.chunk_keys.api import chunk_keys_of_layers
from ...kernels.cluster_search.api import cluster_search
from ...text.table import ChunkTable
from ...types import Intake, KVView, Rows, Selection
from ..index import SlotSizes, Views
from .groups import Groups
from .plant import plant
from .settings import ClusterSettings
from .tree import empty_tree, groups_of, part_of, with_room, write

TOGETHER = 1024
"""Groups of a head that are planted together: each needs half a megabyte meanwhile, and fewer leave a device idle."""


class ClusterIndex:
    """One tree for L layers of S slots each.

    What is in a slot is a function of its clean tokens and its length alone: chunk i lies in group i // places, every
    group is planted from its own chunks, and the text is looked at as far as whole buffers reach. So nothing drifts,
    what is taken back leaves no trace, and it does not matter in which calls the tokens came.

    Attributes:
        settings: sizes and choices.
        table: where the text is cut, S rows.
        tree: of L · S slots, one layer after the other; replaced when it grows, which a `fixed` one does not.
        layers: each layer's part of it.
        placed: slots of the steps' rows, on the host and as int32 `[B]`; None: all, in order.
        fixed: whether searches must not depend on lengths; rows that a set of the budget's size does not hold are then
            none of this index's.
    """

    def __init__(self, settings: ClusterSettings, sizes: SlotSizes) -> None:
        self.settings, self.fixed = settings, sizes.fixed
        self.table = ChunkTable(settings.cuts, sizes.text, sizes.slots, sizes.keys.device, longest=sizes.longest)
        self.placed: tuple[Sequence[int], Tensor] | None = None
        self._numbers = {layer: number for number, layer in enumerate(sizes.layers)}
        self._groups: dict[tuple[object, ...], Groups] = {}
        slots, edges, ends = len(sizes.layers) * sizes.slots, self.table.edges, self.table.ends
        self._lay_out(empty_tree(settings, sizes.keys, slots, edges, ends, settings.groups(sizes.longest)))

    def take_in(self, new: Sequence[Intake], views: Views) -> None:
        if self.table.take_in(new):
            self._groups.clear()
        if self.tree.edges is not self.table.edges:
            self._lay_out(replace(self.tree, edges=self.table.edges, ends=self.table.ends))
        new = [one for one in new if one.kept < one.stop]
        if not new:
            return
        # Of so many rows together, so that the groups of a layer are not too many at once.
        groups = min(self.settings.touched(new), groups_of(self.tree, self.settings))
        together = max(TOGETHER // (groups * self.tree.radii.shape[1]), 1)
        for start in range(0, len(new), together):
            self._plant(new[start : start + together], views)

    def place(self, slots: Sequence[int], on_device: Tensor) -> None:
        self.placed = slots, on_device

    def grow(self, slots: int, longest: int) -> None:
        if slots > len(self.table.stops):
            self.table.grow(slots)
        grown = with_room(self.tree, self.settings, len(self._numbers), slots, self.settings.groups(longest))
        if grown is not self.tree:
            self._lay_out(replace(grown, edges=self.table.edges, ends=self.table.ends))

    def forget(self, slot: int, kept: int) -> None:
        self._groups.clear()
        whole = self.table.forget(slot, kept) // self.settings.replant
        # A unit without tokens is none, whatever else is left of it.
        tokens = self.tree.unit_tokens.unflatten(0, (len(self._numbers), -1))[:, slot]
        group = torch.arange(tokens.shape[2], device=whole.device) // self.settings.units(self.settings.clusters)
        tokens *= group < whole

    def permute(self, rows: Tensor) -> None:
        self.table.permute(rows)
        moved = {
            name: held.unflatten(0, (len(self._numbers), -1)).index_select(1, rows).flatten(0, 1)
            for name, held in self.tree.tensors().items()
            if held.dim() > 2
        }
        self._lay_out(replace(self.tree, **moved, edges=self.table.edges, ends=self.table.ends))

    def warm_up(self, views: Views) -> None:
        self._plant([Intake(len(self.table.stops) - 1, 0, 0, 0)], views)

    @property
    def nbytes(self) -> int:
        return self.tree.nbytes + self.table.counts.nbytes

    def _lay_out(self, tree: ClusterTree) -> None:
        slots = len(self.table.stops)
        # What was found by rows and slots that were others since is found again.
        self._groups.clear()
        parts = {layer: part_of(tree, number * slots, slots) for layer, number in self._numbers.items()}
        layers = {layer: ClusterLayer(self, part) for layer, part in parts.items()}
        # Both at once: who was interrupted lays out again.
        self.tree, self.layers = tree, layers

    def _plant(self, new: Sequence[Intake], views: Views) -> None:
        """Plant the groups in which some chunks are new, some layers at a time."""
        settings, slots, seen = self.settings, len(self.table.stops), views.of([one.slot for one in new])
        numbers, one = [self._numbers[layer] for layer in views.layers], self._touched(new, 1)
        first, step = numbers[0], max(TOGETHER // one.chunks.numel(), 1)
        assert numbers == [*range(first, first + len(numbers))], "layers are neighbours in the tree"
        kvs = [seen[layer] for layer in views.layers]
        for start in range(0, len(kvs), step):
            some = kvs[start : start + step]
            groups = self._touched(new, len(some))
            keys = chunk_keys_of_layers(some, one.edges, longest=settings.chunk_max, pooling=settings.pooling)
            dtype = self.tree.centroids.dtype
            planted = plant(keys.view(-1, settings.replant, keys.shape[-1]), groups, settings, dtype)
            write(part_of(self.tree, (first + start) * slots, len(some) * slots), settings, planted, groups)

    def _touched(self, new: Sequence[Intake], layers: int) -> Groups:
        """Those groups, found once for all layers that ask one after the other."""
        held, heads, key = groups_of(self.tree, self.settings), self.tree.radii.shape[1], (*new, layers)
        if key not in self._groups:
            self._groups[key] = Groups.touched(self.settings, self.table, new, held, heads, layers)
        return self._groups[key]


@dataclass(frozen=True, slots=True, eq=False)
class ClusterLayer:
    """One layer's part of a cluster index: its tree, of all KV heads or of some."""

    owner: ClusterIndex
    tree: ClusterTree

    @property
    def settings(self) -> ClusterSettings:
        return self.owner.settings

    @property
    def table(self) -> ChunkTable:
        return self.owner.table

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
