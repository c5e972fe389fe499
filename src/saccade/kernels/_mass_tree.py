"""Clusters of neighbouring items, which are single tokens or chunks of text, as tensors: what attention mass needs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkMeans:
    """Chunks of text that are the items of clusters.

    Attributes:
        means, spreads: `[R, H, C, d]` in the cache's dtype and float32 `[R, H, C]`.
        edges: int32 `[R, C + 1]`, chunk i has logical positions `edges[i]..edges[i + 1]`.
        owners: int32 `[R, N]`, the chunk of each position.
        counts: int32 `[R]`, chunks of a slot.
    """

    means: Tensor
    spreads: Tensor
    edges: Tensor
    owners: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class MassTree:
    """Slots of one index each, which rows of a batch enter and leave; H KV heads, U places for clusters, N for items.

    Attributes:
        means: `[R, H, U, d]` in the cache's dtype: of the keys of a cluster's tokens.
        spreads: float32 `[R, H, U]`, root of the mean squared distance of these keys from their mean.
        sizes: int32 `[R, H, U]`, tokens of a cluster; one without any is none, whatever else is left of it.
        labels: int16 `[R, H, N]`, an item's cluster among those of its group.
        ends: int32 `[R]`, logical position behind the last token that is in a cluster; 0 where nothing is indexed.
        items, clusters: places for items and for clusters of a group.
        chunks: the items, where these are not single tokens.
    """

    means: Tensor
    spreads: Tensor
    sizes: Tensor
    labels: Tensor
    ends: Tensor
    items: int
    clusters: int
    chunks: ChunkMeans | None = None

    @property
    def nbytes(self) -> int:
        own = (self.means, self.spreads, self.sizes, self.labels, self.ends)
        chunks = () if self.chunks is None else (getattr(self.chunks, field.name) for field in fields(self.chunks))
        return sum(tensor.nbytes for tensor in (*own, *chunks))

    def heads(self, start: int, stop: int) -> MassTree:
        """The tree of KV heads `start..stop`; shares memory."""
        part = slice(start, stop)
        chunks = self.chunks
        if chunks is not None:
            chunks = replace(chunks, means=chunks.means[:, part], spreads=chunks.spreads[:, part])
        return replace(
            self,
            means=self.means[:, part],
            spreads=self.spreads[:, part],
            sizes=self.sizes[:, part],
            labels=self.labels[:, part],
            chunks=chunks,
        )

    def used(self, slots: Tensor) -> Tensor:
        """Places of clusters that may have tokens in these slots, int32 as they are."""
        count = (self.ends if self.chunks is None else self.chunks.counts).index_select(0, slots)
        per_cluster, rest = -(-self.items // self.clusters), count % self.items
        return (count - rest) // self.items * self.clusters + (rest + (per_cluster - 1)) // per_cluster

    def cluster_of(self, items: Tensor, labels: Tensor) -> Tensor:
        """Numbers int64 of the clusters of items that have these labels."""
        return labels.long() + torch.div(items, self.items, rounding_mode="floor") * self.clusters


class MassSettings(NamedTuple):
    """How clusters are scored.

    Attributes:
        width: tokens for which there are scores, a host bound on the rows' lengths.
        sinks: first tokens, which are in no cluster.
        scale: factor of q·k in the softmax.
        spread: how many standard deviations above its mean a cluster's q·k is taken to be.
        each: scores per query head instead of per KV head.
        reach: with chunks, tokens that the kept clusters hold at least.
    """

    width: int
    sinks: int
    scale: float
    spread: float
    each: bool = False
    reach: int = 0
