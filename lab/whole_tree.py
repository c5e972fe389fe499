"""LycheeCluster's index as its paper has it: all chunks of a row are planted together (section 4.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from saccade.kernels._flat import host_bounds
from saccade.kernels.chunk_keys.api import chunk_keys
from saccade.methods.method import Method
from saccade.methods.method import every_layer as plan
from saccade.methods.options import AtLeastOne, Budget, FirstDense, Options
from saccade.selection.clusters.groups import Groups
from saccade.selection.clusters.plant import plant
from saccade.selection.clusters.search import SearchWidths, cluster_search
from saccade.selection.clusters.selector import ClusterSelector
from saccade.selection.clusters.settings import MOST_UNITS, ClusterSettings
from saccade.selection.clusters.tree import ClusterTree, empty_trees, of_layer, write
from saccade.selection.index import Index, KeySizes, SlotSizes
from saccade.text.feed import TokenFeed
from saccade.types import KVView, Selection

from .chunked import ChunkedIndex, ChunkedLayer

Coarse = Literal["sqrt", "cap64", "root"]


class WholeTreeLayer(ChunkedLayer[ClusterTree]):
    """A tree for each slot of one layer."""

    settings: WholeTree

    def planted(self, slot: int, kv: KVView, edges: Tensor, text: TokenFeed | None) -> ClusterTree:
        return built(self.settings, kv, edges)

    def narrowed(self, held: ClusterTree, start: int, stop: int) -> ClusterTree:
        return held.heads(start, stop)

    def tree_of(self, slot: int) -> ClusterTree:
        """That of a slot."""
        return self.held[slot] or nothing(self.owner.keys)

    @property
    def tree(self) -> ClusterTree:
        """That of the only slot."""
        return self.tree_of(0)

    def search(self, q: Tensor, kv: KVView) -> Selection:
        settings, slots = self.settings, self.owner.slots_of(kv.rows.batch)
        trees = [self.tree_of(slot) for slot in slots]
        lengths = [length for _, length in host_bounds(kv.rows)]
        stops = self.owner.table.stops
        width = max(settings.budget, *(settings.always(n, stops[slot]) for n, slot in zip(lengths, slots, strict=True)))
        found = [
            _search(settings, q[row : row + 1], tree, kv.rows.seq_lens[row : row + 1], width)
            for row, tree in enumerate(trees)
        ]
        return Selection(torch.cat([one.ids for one in found]), torch.cat([one.counts for one in found]))


@dataclass(frozen=True)
class WholeTree(ClusterSelector):
    """As `ClusterSelector`, from one group of all chunks."""

    layer: ClassVar[type[WholeTreeLayer]] = WholeTreeLayer
    coarse: Coarse = "sqrt"
    k_g: int | None = None

    def units(self, clusters: int) -> int:
        if self.coarse == "sqrt":
            return super().units(clusters)
        return min(clusters, MOST_UNITS if self.coarse == "cap64" else math.isqrt(max(clusters - 1, 0)) + 1)

    def new_slots(self, sizes: SlotSizes) -> ChunkedIndex | None:  # type: ignore[override]  # an index of its own
        return None if sizes.fixed else ChunkedIndex(self, self.cuts, self.layer, sizes)

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        assert isinstance(index, WholeTreeLayer), "chunks are chosen through their own index"
        return index.search(q, kv)


def nothing(keys: KeySizes) -> ClusterTree:
    """The tree of a row that is not indexed."""
    none = torch.zeros((1, 2), dtype=torch.int32, device=keys.device)
    return of_layer(empty_trees(ClusterSettings(replant=1), keys, 1, none, none[:, 0]), 0)


def built(settings: ClusterSettings, kv: KVView, edges: Tensor) -> ClusterTree:
    """The tree of all chunks between `edges` `[C + 1]` of the only row."""
    chunks = len(edges) - 1
    whole = replace(settings, replant=chunks)
    keys = chunk_keys((kv,), edges[None], longest=whole.chunk_max, pooling=whole.pooling)
    slot = torch.zeros(1, dtype=torch.int64, device=edges.device)
    groups = Groups.of(whole, slot, slot, edges[None], slot + chunks)
    trees = empty_trees(whole, KeySizes.of(kv), 1, edges[None].clone(), edges[-1:].clone())
    write(trees, 0, whole, plant(keys, groups, whole, kv.k.dtype), groups)
    return of_layer(trees, 0)


def _search(settings: WholeTree, q: Tensor, tree: ClusterTree, length: Tensor, width: int) -> Selection:
    """The set of the only row."""
    if settings.k_g is not None:
        # Of the best units each counts as one token, of the others as none: as if they were not there.
        query = q.float().unflatten(1, (tree.radii.shape[1], -1)).mean(2)
        products = (tree.unit_centroids.float() @ query[..., None])[..., 0]
        bounds = products + query.norm(dim=-1, keepdim=True) * tree.unit_radii
        order = bounds.masked_fill(tree.unit_tokens == 0, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
        kept = torch.zeros_like(tree.unit_tokens).scatter_(-1, order[..., : settings.k_g], 1)
        tree = replace(tree, unit_tokens=torch.minimum(tree.unit_tokens, kept))
    widths = SearchWidths(tree.radii.shape[2], max(settings.budget // settings.chunk_min, 1), width)
    return cluster_search(q, tree, length, budget=settings.budget, sinks=settings.sinks, widths=widths)


class WholeTreeOptions(Options):
    """Options of `whole_tree`; all else is as `lychee_cluster` has it."""

    budget: Budget = 1024
    coarse: Coarse = "sqrt"
    """coarse units: sqrt is the root of the clusters but at most 64, cap64 is 64, root has no limit"""
    k_g: AtLeastOne | None = None
    """coarse units that a search keeps; not given: as many as hold 4 budgets of tokens"""
    dense_layers: FirstDense = None

    @property
    def selector(self) -> WholeTree:
        return WholeTree(budget=self.budget, coarse=self.coarse, k_g=self.k_g)


SOURCE = "LycheeCluster, arXiv 2603.08453"
METHOD = Method("whole_tree", "one tree over all chunks", SOURCE, WholeTreeOptions, plan, compared=False, tuned=())
