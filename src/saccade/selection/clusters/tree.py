"""Growing the tree of one row: built from its chunks by k-means, then extended chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ...kernels._cluster_tree import ClusterTree
from ...kernels.spherical_kmeans.api import spherical_kmeans
from .settings import ClusterSettings

_BLOCK_BYTES = 2**25
# One unit in the last place upwards, so that rounding float64 to float32 never shrinks a radius.
_INFLATION = 1 + 2.0**-23


@dataclass(frozen=True, slots=True)
class Grafts:
    """Where chunks were added and what was there before, `[H, n, ...]` in order, so that they can be taken back.

    Attributes:
        clusters, units: where they lie, int64.
        centroids, radii, unit_centroids, unit_radii: of these, before the chunk came.
    """

    clusters: Tensor
    units: Tensor
    centroids: Tensor
    radii: Tensor
    unit_centroids: Tensor
    unit_radii: Tensor

    @property
    def count(self) -> int:
        return self.clusters.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def first(self, count: int) -> Grafts:
        return Grafts(*(tensor[:, :count] for tensor in self._tensors()))

    def last(self, count: int) -> Grafts:
        # A copy: a view would keep the memory of all that ever were.
        return Grafts(*(tensor[:, -count:].clone() for tensor in self._tensors()))

    @classmethod
    def joined(cls, parts: Sequence[Grafts]) -> Grafts:
        return cls(*(torch.cat(tensors, dim=1) for tensors in zip(*(part._tensors() for part in parts), strict=True)))

    def _tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def plant(keys: Tensor, edges: list[int], settings: ClusterSettings, dtype: torch.dtype) -> ClusterTree:
    """The tree `[1, H, ...]` over chunk keys float32 `[H, C, d]` of one row (LycheeCluster, section 4.3).

    `edges` are the chunks' logical positions, C + 1 of them. Everything above the k-means works on centroids as they
    are stored, rounded to `dtype`: radii, units, and later every bound.
    """
    heads, count, _ = keys.shape
    device = keys.device
    clusters = -(-count // settings.cluster_size)
    labels, centroids = spherical_kmeans(keys, clusters)
    stored = centroids.to(dtype)
    units = settings.units(clusters)
    parents, unit_centroids = spherical_kmeans(stored.float(), units)
    unit_stored = unit_centroids.to(dtype)
    parents, numbers = parents.sort(dim=1, stable=True)
    stored = stored.gather(1, numbers[..., None].expand_as(stored))
    labels = numbers.argsort(dim=1).gather(1, labels)
    chunk_parents = parents.gather(1, labels)
    ranked, members = labels.sort(dim=1, stable=True)
    unit_offsets = _offsets(parents, units)
    positions = torch.tensor(edges, device=device)
    lengths = positions.diff().expand(heads, -1)
    tree = {
        "unit_centroids": unit_stored,
        "unit_radii": _radii(keys, chunk_parents, unit_stored),
        "unit_offsets": unit_offsets,
        "unit_tokens": torch.zeros((heads, units), dtype=torch.int64, device=device).scatter_add_(
            1, chunk_parents, lengths
        ),
        "unit_weights": unit_offsets.diff(dim=1),
        "centroids": stored,
        "radii": _radii(keys, labels, stored),
        "numbers": numbers,
        "offsets": _offsets(ranked, clusters),
        "members": members,
        "edges": positions,
        "ends": positions[-1],
    }
    whole = {name: tensor.int() if not tensor.is_floating_point() else tensor for name, tensor in tree.items()}
    return ClusterTree(**{name: tensor[None] for name, tensor in whole.items()})


def graft(tree: ClusterTree, keys: Tensor, lengths: list[int], first: int) -> tuple[Tensor, Grafts]:
    """Add chunks of keys `[H, n, d]` to the tree of one row, in order and in place (LycheeCluster, section 4.4).

    Each goes to the cluster of the nearest centroid and that cluster's unit. Their centroids become running means,
    and their radii grow by what the centroid has moved: all that was inside stays inside.

    Args:
        tree: exactly the row's units, clusters and chunks, `[1, H, ...]`.
        keys: of unit length, float32.
        lengths: the new chunks' tokens.
        first: number of the first new chunk.

    Returns:
        members int32 `[H, C + n]` with the new chunks, and what was before them; offsets are updated in place.
    """
    heads, count, _ = keys.shape
    clusters = tree.centroids.shape[2]
    sizes = tree.offsets[0].diff(dim=1)
    old = torch.repeat_interleave(
        torch.arange(clusters, device=keys.device).repeat(heads), sizes.flatten(), output_size=heads * first
    )
    block = max(1, _BLOCK_BYTES // (4 * heads * clusters))
    grafted = [
        _graft_block(tree, sizes, keys[:, start : start + block], lengths[start : start + block])
        for start in range(0, count, block)
    ]
    done = Grafts.joined(grafted)
    labels = torch.cat((old.view(heads, first), done.clusters), dim=1)
    fresh = torch.arange(first, first + count, dtype=torch.int32, device=keys.device).expand(heads, -1)
    # Stable: old members of a cluster stay before the new ones, so that all lie by position.
    ranked, order = labels.sort(dim=1, stable=True)
    tree.offsets[0].copy_(_offsets(ranked, clusters))
    return torch.cat((tree.members[0], fresh), dim=1).gather(1, order), done


def ungraft(tree: ClusterTree, grafts: Grafts, lengths: list[int], first: int) -> Tensor:
    """Take the last chunks back that `graft` added: the tree is bit by bit what it was before them.

    Args:
        tree: exactly the row's units, clusters and chunks, `[1, H, ...]`; changed in place.
        grafts: of these chunks, all that follow number `first - 1`.
        lengths: their tokens.
        first: number of the first chunk that goes.

    Returns:
        members int32 `[H, first]`.
    """
    head = torch.arange(grafts.clusters.shape[0], device=grafts.clusters.device)
    sizes = tree.offsets[0].diff(dim=1)
    for number in reversed(range(grafts.count)):
        at, above = (head, grafts.clusters[:, number]), (head, grafts.units[:, number])
        tree.centroids[0][at], tree.radii[0][at] = grafts.centroids[:, number], grafts.radii[:, number]
        tree.unit_centroids[0][above] = grafts.unit_centroids[:, number]
        tree.unit_radii[0][above] = grafts.unit_radii[:, number]
        sizes[at] -= 1
        tree.unit_weights[0][above] -= 1
        tree.unit_tokens[0][above] -= lengths[number]
    tree.offsets[0, :, 1:] = sizes.cumsum(dim=1)
    # Stable: those that stay keep their order and come first.
    order = (tree.members[0] >= first).int().sort(dim=1, stable=True).indices
    return tree.members[0].gather(1, order)[:, :first]


def _graft_block(tree: ClusterTree, sizes: Tensor, keys: Tensor, lengths: list[int]) -> Grafts:
    """Where the new chunks go; centroids, radii, sizes and the units' counts are updated in place."""
    heads, count, _ = keys.shape
    centroids, unit_centroids = tree.centroids[0], tree.unit_centroids[0]
    scores = keys @ centroids.float().transpose(1, 2)
    head = torch.arange(heads, device=keys.device)
    stops = tree.unit_offsets[0, :, 1:].contiguous()
    steps = []
    for number, tokens in enumerate(lengths):
        key, row = keys[:, number], scores[:, number]
        best = row == row.amax(dim=1, keepdim=True)
        cluster = tree.numbers[0].masked_fill(~best, torch.iinfo(torch.int32).max).argmin(dim=1)
        unit = torch.searchsorted(stops, cluster[:, None].int(), right=True)[:, 0]
        moved, *before = _move(centroids, tree.radii[0], sizes, (head, cluster), key)
        above = _move(unit_centroids, tree.unit_radii[0], tree.unit_weights[0], (head, unit), key)
        steps.append((cluster, unit, *before, *above[1:]))
        tree.unit_tokens[0][head, unit] += tokens
        # Only this centroid has moved: what the later chunks have to do with the others stands.
        later = torch.arange(number + 1, count, device=keys.device)
        scores[head[:, None], later, cluster[:, None]] = (keys[:, number + 1 :] @ moved.float()[..., None])[..., 0]
    return Grafts(*(torch.stack(parts, dim=1) for parts in zip(*steps, strict=True)))


def _move(
    centroids: Tensor, radii: Tensor, weights: Tensor, at: tuple[Tensor, Tensor], key: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take `key` `[H, d]` into the mean of one node per head; the radius covers what it did, and `key`.

    Returns the new centroids, the old ones and the old radii.
    """
    old, old_radii, weight = centroids[at], radii[at], weights[at][:, None]
    total = old.float() * weight + key
    length = torch.linalg.vector_norm(total, dim=-1, keepdim=True)
    new = torch.where(length > 0, (total / length).to(old.dtype), old)
    way = _distance(new, old)
    radii[at] = _rounded_up(torch.maximum(old_radii.double() + way, _distance(key, new)))
    centroids[at] = new
    weights[at] += 1
    return new, old, old_radii


def _radii(vectors: Tensor, labels: Tensor, centers: Tensor) -> Tensor:
    """Largest distance of each center's vectors, float32 `[H, n]`, never below the exact one."""
    heads, count, head_dim = vectors.shape
    radii = torch.zeros(centers.shape[:2], dtype=torch.float64, device=vectors.device)
    block = max(1, _BLOCK_BYTES // (16 * heads * head_dim))
    for start in range(0, count, block):
        some = labels[:, start : start + block]
        nearest = centers.gather(1, some[..., None].expand(-1, -1, head_dim))
        radii.scatter_reduce_(1, some, _distance(vectors[:, start : start + block], nearest), "amax")
    return _rounded_up(radii)


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """In float64, where rounding is far below the inflation of a radius."""
    distance: Tensor = torch.linalg.vector_norm(one.double() - other.double(), dim=-1)
    return distance


def _rounded_up(radii: Tensor) -> Tensor:
    return (radii * _INFLATION).float()


def _offsets(ranked: Tensor, count: int) -> Tensor:
    """Where each of `count` labels begins in ascending labels `[H, N]`, and the end: int32 `[H, count + 1]`."""
    labels = torch.arange(count + 1, device=ranked.device).expand(ranked.shape[0], -1).contiguous()
    return torch.searchsorted(ranked, labels).int()
