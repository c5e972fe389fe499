"""The cluster index: groups of chunks, each planted anew when its chunks have changed, of many slots and layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...kernels._cluster_tree import ClusterTree, SearchWidths
from ...kernels._flat import host_bounds
from ...kernels.chunk_keys.api import chunk_keys_of_layers
from ...kernels.cluster_search.api import cluster_search
from ...text.table import Change, ChunkTable
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
        self._versions = dict.fromkeys(sizes.layers, 0)
        self._groups: dict[tuple[object, ...], Groups] = {}
        slots, edges, ends = len(sizes.layers) * sizes.slots, self.table.edges, self.table.ends
        self._lay_out(empty_tree(settings, sizes.keys, slots, edges, ends, settings.groups(sizes.longest)))

    def take_in(self, new: Sequence[Intake], views: Views) -> None:
        if new:
            self.table.take_in(new)
            if self.tree.edges is not self.table.edges:
                self._lay_out(replace(self.tree, edges=self.table.edges, ends=self.table.ends))
        known = min(map(self._versions.__getitem__, views.layers))
        change = self.table.since(known)
        if change is None:
            return
        for part in self._parts(change):
            kvs = views.of(part.rows)
            self._plant(part, views.layers, [kvs[layer] for layer in views.layers], known)
        # Only now: who was interrupted plants again.
        self._versions.update(dict.fromkeys(views.layers, self.table.version))
        if len(views.layers) == len(self._versions):
            self._groups.clear()

    def place(self, slots: Sequence[int], on_device: Tensor) -> None:
        self.placed = slots, on_device

    def grow(self, slots: int, longest: int) -> None:
        if slots > len(self.table.stops):
            self.table.grow(slots)
        grown = with_room(self.tree, self.settings, len(self._versions), slots, self.settings.groups(longest))
        if grown is not self.tree:
            self._lay_out(replace(grown, edges=self.table.edges, ends=self.table.ends))

    def clear(self, slot: int) -> None:
        self.table.clear(slot)
        # A unit without tokens is none, whatever else is left of it.
        self.tree.unit_tokens.unflatten(0, (len(self._versions), -1))[:, slot].zero_()

    def permute(self, rows: Tensor) -> None:
        self.table.permute(rows)
        moved = {
            name: held.unflatten(0, (len(self._versions), -1)).index_select(1, rows).flatten(0, 1)
            for name, held in self.tree.tensors().items()
            if held.dim() > 2
        }
        self._lay_out(replace(self.tree, **moved, edges=self.table.edges, ends=self.table.ends))

    def warm_up(self, views: Views) -> None:
        nothing, last = self.table.counts[-1:].long(), len(self.table.stops) - 1
        kvs = views.of((last,))
        self._plant(Change((last,), nothing, nothing, 1), views.layers, [kvs[layer] for layer in views.layers], -1)
        self._groups.clear()

    @property
    def nbytes(self) -> int:
        return self.tree.nbytes + self.table.counts.nbytes

    def _lay_out(self, tree: ClusterTree) -> None:
        slots, numbered = len(self.table.stops), enumerate(self._versions)
        # What was found by rows and slots that were others since is found again.
        self._groups.clear()
        layers = {layer: ClusterLayer(self, part_of(tree, number * slots, slots)) for number, layer in numbered}
        # Both at once: who was interrupted lays out again.
        self.tree, self.layers = tree, layers

    def _parts(self, change: Change) -> Iterator[Change]:
        """A change in pieces whose groups in one layer are not too many at once."""
        size, heads = self.settings.replant, self.tree.radii.shape[1]
        groups = min(-(-change.most // size) + 1, groups_of(self.tree, self.settings))
        return change.parts(max(TOGETHER // (groups * heads), 1))

    def _plant(self, change: Change, layers: Sequence[int], kvs: Sequence[KVView], known: int) -> None:
        """Plant the groups of a change since version `known`, whose rows are those of each of `kvs`, some layers at a
        time."""
        settings, slots, numbers = self.settings, len(self.table.stops), [*self._versions]
        first, one = numbers.index(layers[0]), self._touched(change, 1, known)
        assert [*layers] == numbers[first : first + len(layers)], "layers are neighbours in the tree"
        step = max(TOGETHER // one.chunks.numel(), 1)
        for start in range(0, len(kvs), step):
            some = kvs[start : start + step]
            groups = self._touched(change, len(some), known)
            keys = chunk_keys_of_layers(some, one.edges, longest=settings.chunk_max, pooling=settings.pooling)
            dtype = self.tree.centroids.dtype
            planted = plant(keys.view(-1, settings.replant, keys.shape[-1]), groups, settings, dtype)
            write(part_of(self.tree, (first + start) * slots, len(some) * slots), settings, planted, groups)

    def _touched(self, change: Change, layers: int, known: int) -> Groups:
        """The groups of a change, found once for all layers that ask one after the other."""
        held, heads = groups_of(self.tree, self.settings), self.tree.radii.shape[1]
        key = self.table.version, known, change.rows, layers, held
        if key not in self._groups:
            self._groups = {other: found for other, found in self._groups.items() if other[0] == key[0]}
            self._groups[key] = Groups.touched(self.settings, self.table, change, held, heads, layers)
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
