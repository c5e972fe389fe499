"""The paper's letter: a prompt's chunks are planted together, later ones join lazily (LycheeCluster, section 4.4).

Its centroids drift together as a text grows; it is here to be measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels._cluster_tree import ClusterTree, SearchWidths, distance, rounded_up
from ...kernels._flat import host_bounds
from ...kernels.chunk_keys.api import chunk_keys
from ...kernels.cluster_search.api import cluster_search
from ...types import KVView, Selection
from ..chunk_table import ChunkTable
from ..history import TokenHistory
from ..selector import KeySizes, NewTokens
from .groups import Groups
from .plant import plant
from .settings import ClusterSettings
from .tree import empty_tree, write


@dataclass(frozen=True, slots=True)
class _Row:
    """One row's tree `[1, H, ...]`, replaced whenever chunks come or go.

    Attributes:
        weights: int64 `[H, U]`, how many vectors a unit's centroid is the mean of.
        chunks: how many there are, and how many of them the k-means saw.
        prompt: tokens of the prompt when it did.
    """

    tree: ClusterTree
    weights: Tensor
    chunks: int
    planted: int
    prompt: int


@dataclass(slots=True)
class LazyClusterIndex:
    """A tree for each row of one layer; None while a row is not indexed.

    Attributes:
        settings: sizes and choices.
        table: where the text is cut; shared with the other layers.
        history: how far the cache is clean, and what was prompt.
        version: of the table that the trees were made from.
    """

    settings: ClusterSettings
    table: ChunkTable
    history: TokenHistory
    rows: list[_Row | None]
    version: int = 0

    def update(self, kv: KVView, new: NewTokens) -> None:
        """Plant the chunks of a new prompt, or where some of those planted have gone; else let later ones join."""
        self.history.follow(self.table, kv.rows, new.count, self.settings.stop)
        change = self.table.since(self.version)
        if change is None:
            return
        starts = [slot for slot, _ in host_bounds(kv.rows)]
        for row, first in zip(change.rows, change.first.tolist(), strict=True):
            chunks, held, prompt = int(self.table.counts[row]), self.rows[row], self.history.prompt - starts[row]
            if not chunks:
                self.rows[row] = None
                continue
            edges, one = self.table.edges[row, : chunks + 1], kv.picked([row])
            if held is None or prompt > held.prompt or first < held.planted:
                held = self._planted(one, edges, prompt)
            elif first < held.chunks:
                held = self._planted(one, edges[: held.planted + 1], held.prompt)
            self.rows[row] = self._joined(one, edges, held)
        self.version = self.table.version

    def search(self, q: Tensor, kv: KVView) -> Selection:
        """The set of every KV head for queries `[B, Hq, d]`, row by row."""
        settings, found = self.settings, []
        pairs = zip(host_bounds(kv.rows), self.table.stops, strict=True)
        width = max(settings.budget, *(settings.always(length, stop) for (_, length), stop in pairs))
        for row, held in enumerate(self.rows):
            tree = _nothing(kv) if held is None else held.tree
            one = slice(row, row + 1)
            widths = SearchWidths(tree.radii.shape[2], max(settings.budget // settings.chunk_min, 1), width)
            found.append(
                cluster_search(
                    q[one],
                    tree,
                    kv.rows.seq_lens[one],
                    budget=settings.budget,
                    sinks=settings.sinks,
                    widths=widths,
                )
            )
        return Selection(torch.cat([one.ids for one in found]), torch.cat([one.counts for one in found]))

    def permute(self, rows: Tensor) -> None:
        self.rows = [self.rows[row] for row in rows.tolist()]

    def heads(self, start: int, stop: int) -> LazyClusterIndex:
        rows = [None if row is None else replace(row, tree=row.tree.heads(start, stop)) for row in self.rows]
        return replace(self, rows=rows)

    @property
    def nbytes(self) -> int:
        return sum(row.tree.nbytes + row.weights.nbytes for row in self.rows if row is not None)

    def _planted(self, kv: KVView, edges: Tensor, prompt: int) -> _Row:
        """The tree of all chunks between `edges`."""
        chunks, heads = len(edges) - 1, kv.kv_heads
        whole = replace(self.settings, replant=chunks)
        keys = chunk_keys(kv, edges[None], longest=whole.chunk_max, pooling=whole.pooling)[0]
        slot = torch.zeros(1, dtype=torch.int64, device=edges.device)
        groups = Groups.of(whole, slot, slot, edges[None], slot + chunks, heads)
        tree = empty_tree(whole, KeySizes.of(kv), 1, edges[None].clone(), edges[-1:].clone())
        write(tree, whole, plant(keys, groups, whole, kv.k.dtype), groups)
        return _Row(tree, tree.unit_offsets[0].long().diff(dim=1), chunks, chunks, prompt)

    def _joined(self, kv: KVView, edges: Tensor, held: _Row) -> _Row:
        """The row with the chunks that follow its own, up to the last of `edges`."""
        if len(edges) - 1 == held.chunks:
            return held
        new = edges[held.chunks :]
        keys = chunk_keys(kv, new[None], longest=self.settings.chunk_max, pooling=self.settings.pooling)[0]
        own = {name: tensor.clone() for name, tensor in held.tree.tensors().items()}
        tree = replace(ClusterTree(**own), edges=edges[None].clone(), ends=edges[-1:].clone())
        weights = held.weights.clone()
        members = graft(tree, weights, keys, new.diff().tolist(), held.chunks)
        return replace(held, tree=replace(tree, members=members[None]), weights=weights, chunks=len(edges) - 1)


def graft(tree: ClusterTree, weights: Tensor, keys: Tensor, lengths: list[int], first: int) -> Tensor:
    """Add chunks of keys `[H, n, d]` to the tree of one row, in order and in place (LycheeCluster, section 4.4).

    Each goes to the cluster of the nearest centroid and that cluster's unit. Their centroids become running means,
    and their radii grow by what the centroid has moved: all that was inside stays inside.

    Args:
        tree: of one row, `[1, H, ...]`.
        weights: int64 `[H, U]`, how many vectors a unit's centroid is the mean of; updated too.
        keys: of unit length, float32.
        lengths: the new chunks' tokens.
        first: number of the first new chunk.

    Returns:
        members int32 `[H, first + n]`; of a cluster the latest chunk first.
    """
    heads, count, _ = keys.shape
    sizes = tree.offsets[0].long().diff(dim=1)
    centroids, unit_centroids = tree.centroids[0], tree.unit_centroids[0]
    scores = keys @ centroids.float().transpose(1, 2)
    head = torch.arange(heads, device=keys.device)
    stops = tree.unit_offsets[0, :, 1:].contiguous()
    number = torch.arange(tree.radii.shape[2], device=keys.device)
    labels = number.repeat(heads).repeat_interleave(sizes.flatten()).view(heads, first)
    joined = []
    for chunk, tokens in enumerate(lengths):
        key, row = keys[:, chunk], scores[:, chunk]
        best = row == row.amax(dim=1, keepdim=True)
        cluster = tree.numbers[0].masked_fill(~best, torch.iinfo(torch.int32).max).argmin(dim=1)
        unit = torch.searchsorted(stops, cluster[:, None].int(), right=True)[:, 0]
        moved = _move(centroids, tree.radii[0], sizes, (head, cluster), key)
        _move(unit_centroids, tree.unit_radii[0], weights, (head, unit), key)
        joined.append(cluster)
        tree.unit_tokens[0][head, unit] += tokens
        # Only this centroid has moved: what the later chunks have to do with the others stands.
        later = torch.arange(chunk + 1, count, device=keys.device)
        scores[head[:, None], later, cluster[:, None]] = (keys[:, chunk + 1 :] @ moved.float()[..., None])[..., 0]
    tree.offsets[0, :, 1:] = sizes.cumsum(dim=1)
    fresh = torch.arange(first + count - 1, first - 1, -1, dtype=torch.int32, device=keys.device).expand(heads, -1)
    labels = torch.cat((*(cluster[:, None] for cluster in reversed(joined)), labels), dim=1)
    # Stable: the latest of a cluster stay first.
    order = labels.sort(dim=1, stable=True).indices
    return torch.cat((fresh, tree.members[0]), dim=1).gather(1, order)


def _move(centroids: Tensor, radii: Tensor, weights: Tensor, at: tuple[Tensor, Tensor], key: Tensor) -> Tensor:
    """Take `key` `[H, d]` into the mean of one node per head; the radius covers what it did, and `key`."""
    old, weight = centroids[at], weights[at][:, None]
    total = old.float() * weight + key
    length = torch.linalg.vector_norm(total, dim=-1, keepdim=True)
    new = torch.where(length > 0, (total / length).to(old.dtype), old)
    radii[at] = rounded_up(torch.maximum(radii[at].double() + distance(new, old), distance(key, new)))
    centroids[at] = new
    weights[at] += 1
    return new


def _nothing(kv: KVView) -> ClusterTree:
    """The tree of a row that is not indexed."""
    none = torch.zeros((1, 2), dtype=torch.int32, device=kv.k.device)
    return empty_tree(ClusterSettings(replant=1), KeySizes.of(kv), 1, none, none[:, 0])
