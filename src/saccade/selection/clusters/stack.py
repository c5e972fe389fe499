"""Cluster indexes of many layers in one piece of memory, which never moves: a captured step can search them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...kernels._cluster_tree import ClusterTree
from ...kernels.chunk_keys.api import chunk_keys_of_layers
from ...types import KVView
from ..chunk_table import Change, ChunkTable
from ..history import TokenHistory
from ..selector import KeySizes
from .groups import Groups
from .index import ClusterIndex
from .plant import plant
from .settings import ClusterSettings
from .tree import empty_tree, groups_of, write

TOGETHER = 1024
"""Groups of a head that are planted together: each needs half a megabyte meanwhile, and fewer leave a device idle."""


@dataclass(slots=True, eq=False)
class ClusterStack:
    """One tree for L layers of R slots each, planted by the same few launches for all layers.

    Attributes:
        settings: sizes and choices.
        table: where the text is cut, R rows.
        tree: of L · R slots, one layer after the other.
        layers: the layers' indexes, which see their part of the tree.
    """

    settings: ClusterSettings
    table: ChunkTable
    tree: ClusterTree
    layers: Mapping[int, ClusterIndex]

    @classmethod
    def empty(
        cls,
        settings: ClusterSettings,
        layers: Sequence[int],
        keys: KeySizes,
        rows: int,
        longest: int,
        history: TokenHistory,
    ) -> ClusterStack:
        """Room for `rows` rows of at most `longest` tokens in every layer, and nothing in it."""
        text = settings.chunking == "text"
        table = ChunkTable(settings.cuts, history if text else None, rows, keys.device, longest=longest)
        history.tables[settings.cuts, text] = table
        groups = settings.cuts.most(longest) // settings.group_size + 1
        tree = empty_tree(settings, keys, len(layers) * rows, table.edges, table.ends, groups)
        parts = {
            layer: ClusterIndex(settings, table, _part(tree, number * rows, rows), history, fixed=True)
            for number, layer in enumerate(layers)
        }
        return cls(settings, table, tree, parts)

    def clear(self, slot: int) -> None:
        self.table.clear(slot)
        # A unit without tokens is none, whatever else is left of it.
        self.tree.unit_tokens.unflatten(0, (len(self.layers), -1))[:, slot].zero_()

    def warm_up(self, kvs: Mapping[int, KVView]) -> None:
        nothing = self.table.counts[-1:].long()
        self._plant(Change((len(self.table.stops) - 1,), nothing, nothing, 1), [kvs[layer] for layer in self.layers])

    @property
    def stale(self) -> bool:
        return any(index.stale for index in self.layers.values())

    def plant(self, seen: Callable[[Sequence[int]], Mapping[int, KVView]]) -> None:
        change = self.table.since(min(index.version for index in self.layers.values()))
        if change is not None:
            for part in change.parts(self._rows_together(change)):
                kvs = seen(part.rows)
                self._plant(part, [kvs[layer] for layer in self.layers])
        # Only now: who was interrupted plants again.
        for index in self.layers.values():
            index.version = self.table.version

    @property
    def nbytes(self) -> int:
        return self.tree.nbytes + self.table.counts.nbytes

    def _rows_together(self, change: Change) -> int:
        """Rows of a change whose groups in one layer are not too many at once."""
        size, heads = self.settings.group_size, self.tree.radii.shape[1]
        groups = min(-(-change.most // size) + 1, groups_of(self.tree, self.settings))
        return max(TOGETHER // (groups * heads), 1)

    def _plant(self, change: Change, kvs: Sequence[KVView]) -> None:
        """Plant the groups of a change, whose rows are those of each of `kvs`, some layers at a time."""
        settings, table, heads = self.settings, self.table, kvs[0].kv_heads
        held, slots = groups_of(self.tree, settings), len(table.stops)
        one = Groups.touched(settings, table, change, held, heads)
        step, made = max(TOGETHER // one.chunks.numel(), 1), {1: one}
        for start in range(0, len(kvs), step):
            some = kvs[start : start + step]
            if len(some) not in made:
                made[len(some)] = Groups.touched(settings, table, change, held, heads, len(some))
            groups = made[len(some)]
            keys = chunk_keys_of_layers(some, one.edges, longest=settings.chunk_max, pooling=settings.pooling)
            dtype = self.tree.centroids.dtype
            planted = plant(keys.view(-1, settings.group_size, keys.shape[-1]), groups, settings, dtype)
            write(_part(self.tree, start * slots, len(some) * slots), settings, planted, groups)


def _part(tree: ClusterTree, start: int, rows: int) -> ClusterTree:
    """The tree of some slots; shares memory."""
    own = {name: held[start : start + rows] for name, held in tree.tensors().items() if held.dim() > 2}
    return replace(tree, **own)
