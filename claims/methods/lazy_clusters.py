"""The paper's letter: a prompt's chunks are planted together, later ones join lazily (LycheeCluster, section 4.4)."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lab.whole_tree import SOURCE, WholeTree, WholeTreeLayer, built
from saccade.kernels._flat import host_bounds
from saccade.kernels.chunk_keys.api import chunk_keys
from saccade.methods.method import Method
from saccade.methods.method import every_layer as plan
from saccade.methods.options import Budget, FirstDense, Options
from saccade.selection.clusters.tree import ClusterTree, distance, rounded_up
from saccade.text.feed import TokenFeed
from saccade.text.history import TokenHistory
from saccade.types import KVView


@dataclass(frozen=True, slots=True)
class LazyTree(ClusterTree):
    """One row's tree, replaced whenever chunks come or go.

    Attributes:
        weights: int64 `[H, U]`, how many vectors a unit's centroid is the mean of.
        chunks, built: how many there are, and how many of them the k-means saw.
        prompt: tokens of the prompt when it did.
    """

    weights: Tensor
    chunks: int
    built: int
    prompt: int


class LazyClusterLayer(WholeTreeLayer):
    """Plants the chunks of a new prompt, or all there are where some were taken back; else later ones join."""

    def planted(self, slot: int, kv: KVView, edges: Tensor, text: TokenFeed | None) -> ClusterTree:
        settings, held = self.settings, self.held[slot]
        assert isinstance(text, TokenHistory), "it is a method of transformers, where a prompt is known"
        prompt = text.prompt - host_bounds(kv.rows)[0][0]
        if not isinstance(held, LazyTree) or prompt > held.prompt:
            held = _built(settings, kv, edges, prompt)
        return _joined(settings, kv, edges, held)


@dataclass(frozen=True)
class LazyClusters(WholeTree):
    """As `WholeTree`, but for later chunks."""

    layer = LazyClusterLayer


def _built(settings: WholeTree, kv: KVView, edges: Tensor, prompt: int) -> LazyTree:
    """The tree of all chunks between `edges`."""
    tree, chunks = built(settings, kv, edges).tensors(), len(edges) - 1
    weights = tree["unit_offsets"][0].long().diff(dim=1)
    return LazyTree(**tree, weights=weights, chunks=chunks, built=chunks, prompt=prompt)


def _joined(settings: WholeTree, kv: KVView, edges: Tensor, held: LazyTree) -> LazyTree:
    """The tree with the chunks that follow its own, up to the last of `edges`."""
    if len(edges) - 1 == held.chunks:
        return held
    new = edges[held.chunks :]
    keys = chunk_keys((kv,), new[None], longest=settings.chunk_max, pooling=settings.pooling)[0, 0]
    own: dict[str, Any] = {name: tensor.clone() for name, tensor in held.tensors().items()}
    tree = replace(held, **own, weights=held.weights.clone(), chunks=len(edges) - 1)
    members = _insert(tree, keys, new.diff().tolist(), held.chunks)
    return replace(tree, members=members[None], edges=edges[None].clone(), ends=edges[-1:].clone())


def _insert(tree: LazyTree, keys: Tensor, lengths: list[int], first: int) -> Tensor:
    """Add chunks of keys `[H, n, d]`, float32 and of unit length, to a tree of `first` chunks, in order and in place.

    Each goes to the cluster of the nearest centroid and that cluster's unit. Their centroids become running means,
    and their radii grow by what the centroid has moved: all that was inside stays inside. Gives the tree's new members.
    """
    heads, count, _ = keys.shape
    sizes, centroids = tree.offsets[0].long().diff(dim=1), tree.centroids[0]
    scores = keys @ centroids.float().transpose(1, 2)
    head = torch.arange(heads, device=keys.device)
    stops = tree.unit_offsets[0, :, 1:].contiguous()
    number = torch.arange(tree.radii.shape[2], device=keys.device)
    labels = number.repeat(heads).repeat_interleave(sizes.flatten()).view(heads, first)
    for chunk, tokens in enumerate(lengths):
        key, row = keys[:, chunk], scores[:, chunk]
        best = row == row.amax(dim=1, keepdim=True)
        cluster = tree.numbers[0].masked_fill(~best, torch.iinfo(torch.int32).max).argmin(dim=1)
        unit = torch.searchsorted(stops, cluster[:, None].int(), right=True)[:, 0]
        moved = _move(centroids, tree.radii[0], sizes, (head, cluster), key)
        _move(tree.unit_centroids[0], tree.unit_radii[0], tree.weights, (head, unit), key)
        labels = torch.cat((cluster[:, None], labels), dim=1)
        tree.unit_tokens[0][head, unit] += tokens
        # Only this centroid has moved: what the later chunks have to do with the others stands.
        later = torch.arange(chunk + 1, count, device=keys.device)
        scores[head[:, None], later, cluster[:, None]] = (keys[:, chunk + 1 :] @ moved.float()[..., None])[..., 0]
    tree.offsets[0, :, 1:] = sizes.cumsum(dim=1)
    fresh = torch.arange(first + count - 1, first - 1, -1, dtype=torch.int32, device=keys.device).expand(heads, -1)
    # Stable: the latest of a cluster stay first.
    return torch.cat((fresh, tree.members[0]), dim=1).gather(1, labels.sort(dim=1, stable=True).indices)


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


class LazyClustersOptions(Options):
    """Options of `lazy_clusters`; all else is as `lychee_cluster` has it."""

    budget: Budget = 1024
    dense_layers: FirstDense = None

    @property
    def selector(self) -> LazyClusters:
        return LazyClusters(self.budget)


METHOD = Method("lazy_clusters", "later chunks join", SOURCE, LazyClustersOptions, plan, compared=False, tuned=())
