"""The cluster index of one layer: groups of chunks, each planted anew when its chunks have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...kernels._cluster_tree import ClusterTree, SearchWidths
from ...kernels._flat import host_bounds
from ...kernels.chunk_keys.api import chunk_keys
from ...kernels.cluster_search.api import cluster_search
from ...types import KVView, Rows, Selection
from ..chunk_table import Change, ChunkTable
from ..history import TokenHistory
from ..selector import KeySizes, NewTokens
from .groups import Groups
from .plant import plant
from .settings import ClusterSettings
from .tree import empty_tree, groups_of, with_room, write


@dataclass(slots=True)
class ClusterIndex:
    """Clusters and units of one layer's rows, each in a slot of one tree.

    A row's index is a function of its clean tokens and its length alone: chunk i lies in group i // S, every group is
    planted from its own chunks, and the text is looked at as far as whole buffers reach. So nothing drifts, what is
    taken back leaves no trace, and it does not matter in which calls the tokens came.

    Attributes:
        settings: sizes and choices.
        table: where the text is cut; shared with the other layers.
        tree: of all slots; grows with the longest row.
        history: how far the cache is clean.
        slots: where the batch's rows are in the tree, on the host and as int32 `[B]`; None: all, in order.
        version: of the table that the tree was planted from.
        fixed: whether searches must not depend on lengths; rows that a set of the budget's size does not hold are then
            none of this index's.
    """

    settings: ClusterSettings
    table: ChunkTable
    tree: ClusterTree
    history: TokenHistory
    slots: tuple[Sequence[int], Tensor] | None = None
    version: int = 0
    fixed: bool = False

    @classmethod
    def empty(cls, settings: ClusterSettings, table: ChunkTable, history: TokenHistory, kv: KVView) -> ClusterIndex:
        """An index of no chunk yet, with a slot for every row of the table."""
        tree = empty_tree(settings, KeySizes.of(kv), len(table.stops), table.edges, table.ends)
        return cls(settings, table, tree, history)

    def update(self, kv: KVView, new: NewTokens) -> None:
        # Nearly always there is nothing to do, in every layer of every step.
        if self.table.seen is not new.rows:
            self.history.follow(self.table, new.rows, new.count, self.settings.stop)
        if self.version != self.table.version:
            self.plant(kv)

    def plant(self, kv: KVView, slots: Sequence[int] | None = None) -> None:
        """Plant the groups whose chunks the table has changed since the last time; `kv` has these rows.

        They are in `slots`; None: all rows, in order.
        """
        change = self.table.since(self.version)
        # Also for a row of which nothing is indexed.
        self.tree = with_room(self.tree, self.settings, len(self.table.stops), 0)
        if change is not None:
            held = range(kv.rows.batch) if slots is None else slots
            self._plant(kv.picked([held.index(slot) for slot in change.rows]), change)
        # Only now: who was interrupted plants again.
        self.version = self.table.version

    @property
    def stale(self) -> bool:
        return self.version != self.table.version or self.tree.radii.shape[0] < len(self.table.stops)

    def clear(self, slot: int) -> None:
        # A unit without tokens is none, whatever else is left of it.
        self.tree.unit_tokens[slot].zero_()

    def search(self, q: Tensor, kv: KVView) -> Selection:
        """The set of every KV head for queries `[B, Hq, d]`."""
        settings, table = self.settings, self.table
        if self.tree.edges is not table.edges or self.tree.ends is not table.ends:
            self.tree = replace(self.tree, edges=table.edges, ends=table.ends)
        return cluster_search(
            q,
            self.tree,
            kv.rows.seq_lens,
            budget=settings.budget,
            sinks=settings.sinks,
            widths=self._widths(kv.rows),
            slots=None if self.slots is None else self.slots[1],
        )

    def permute(self, rows: Tensor) -> None:
        own = {name: held.index_select(0, rows) for name, held in self.tree.tensors().items() if held.dim() > 2}
        self.tree = replace(self.tree, **own)

    def heads(self, start: int, stop: int) -> ClusterIndex:
        if (start, stop) == (0, self.tree.radii.shape[1]):
            return self
        return replace(self, tree=self.tree.heads(start, stop))

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.tree.tensors().values() if held.dim() > 2)

    def _widths(self, rows: Rows) -> SearchWidths:
        """Bounds that follow from the settings and, for a row of which too little is clean, from its length."""
        settings, stops = self.settings, self.table.stops
        tokens = settings.budget
        if not self.fixed:
            slots = range(rows.batch) if self.slots is None else self.slots[0]
            for slot, (_, length) in zip(slots, host_bounds(rows), strict=True):
                tokens = max(tokens, settings.always(length, stops[slot]) if length > settings.budget else 1)
        units = 4 * settings.budget // settings.chunk_min + 1
        return SearchWidths(
            clusters=units + settings.clusters,
            chunks=max(settings.budget // settings.chunk_min, 1),
            tokens=tokens,
        )

    def _plant(self, kv: KVView, change: Change) -> None:
        """Plant the groups of a change, whose rows are those of `kv`."""
        settings, table, heads = self.settings, self.table, kv.kv_heads
        most = table.cuts.most(max(table.stops)) // settings.group_size + 1
        self.tree = with_room(self.tree, settings, len(table.stops), most)
        held = groups_of(self.tree, settings)
        groups = table.once(
            (self.version, settings, held, heads), lambda: Groups.touched(settings, table, change, held, heads)
        )
        keys = chunk_keys(kv, groups.edges, longest=settings.chunk_max, pooling=settings.pooling)
        planted = plant(keys.reshape(-1, settings.group_size, kv.head_dim), groups, settings, kv.k.dtype)
        write(self.tree, settings, planted, groups)
