"""Spherical k-means on CUDA: labels without a matrix of inner products, and one program per centroid that moves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._kmeans import Sizes, first_centroids, refill

MEMBERS = 4
"""Members of a cluster that are read at a time."""
COMPARED = 128
"""The most vectors of which one program compares all pairs instead of sorting them, in a launch instead of thirty."""


@dataclass(frozen=True)
class Tiles:
    """How many vectors a program has, and with how many centroids it compares them at a time."""

    vectors: int
    centroids: int
    warps: int


def spherical_kmeans(vectors: Tensor, clusters: int, iterations: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    vectors = vectors.contiguous()
    heads, count, _ = vectors.shape
    centroids, present = first_centroids(vectors, clusters, sizes)
    nearest = torch.empty((heads, count), dtype=torch.int64, device=vectors.device)
    own = torch.empty((heads, count), dtype=torch.float32, device=vectors.device)
    numbers = torch.arange(clusters + 1, dtype=torch.int32, device=vectors.device).expand(heads, -1).contiguous()
    labels = torch.empty_like(nearest)
    with torch.cuda.device_of(vectors):
        for _ in range(iterations):
            _assigned(vectors, centroids, sizes, nearest, own)
            if count <= COMPARED:
                order, offsets = _settled(nearest, own, sizes[1], clusters, labels)
            else:
                labels = refill(nearest, own, present)
                ranked, order = labels.int().sort(dim=1, stable=True)
                offsets = torch.searchsorted(ranked, numbers)
            _average(vectors, order, offsets, centroids)
    return labels, centroids


def tiles(device: torch.device, inner: int) -> Tiles:
    """What fits into registers and shared memory, by whether products are by warp groups (Hopper) or by warps."""
    if inner > 128:
        return Tiles(16, 32, 4)
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9:
        return Tiles(128, 32, 8)
    return Tiles(128, 32, 8) if inner <= 64 else Tiles(32, 64, 4)


def _assigned(vectors: Tensor, centroids: Tensor, sizes: Sizes, nearest: Tensor, own: Tensor) -> None:
    """Each vector's centroid of largest inner product, and that product."""
    heads, count, head_dim = vectors.shape
    inner = max(triton.next_power_of_2(head_dim), 16)
    tile = tiles(vectors.device, inner)
    _assign[(triton.cdiv(count, tile.vectors), heads)](
        vectors,
        centroids,
        *sizes,
        nearest,
        own,
        count,
        centroids.shape[1],
        HEAD_DIM=head_dim,
        INNER=inner,
        VECTORS=tile.vectors,
        CENTROIDS=tile.centroids,
        num_warps=tile.warps,
        num_stages=2,
    )


def _settled(nearest: Tensor, own: Tensor, made: Tensor, clusters: int, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Puts labels after every empty cluster has taken a vector in place; vectors by label, and where each begins."""
    problems, count = nearest.shape
    order = torch.empty((problems, count), dtype=torch.int32, device=nearest.device)
    offsets = order.new_empty((problems, clusters + 1))
    _settle[(problems,)](
        *(nearest, own, made, labels, order, offsets, count, clusters),
        VECTORS=max(triton.next_power_of_2(count), 16),
        CENTROIDS=max(triton.next_power_of_2(clusters), 16),
        num_warps=8,
    )
    return order, offsets


def _average(vectors: Tensor, order: Tensor, offsets: Tensor, centroids: Tensor) -> None:
    """Centroids become the normalised sums of their members, in place; where that is zero they stay."""
    heads, count, head_dim = vectors.shape
    _move[(centroids.shape[1], heads)](
        vectors,
        order,
        offsets,
        centroids,
        count,
        centroids.shape[1],
        HEAD_DIM=head_dim,
        INNER=triton.next_power_of_2(head_dim),
        MEMBERS=MEMBERS,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["count", "clusters"])
def _assign(
    vectors: tl.tensor,
    centroids: tl.tensor,
    counts: tl.tensor,
    cluster_counts: tl.tensor,
    nearest: tl.tensor,
    own: tl.tensor,
    count: tl.tensor,
    clusters: tl.tensor,
    HEAD_DIM: tl.constexpr,
    INNER: tl.constexpr,
    VECTORS: tl.constexpr,
    CENTROIDS: tl.constexpr,
) -> None:
    """The lowest centroid of largest inner product of a block of vectors; label `clusters` of those that are absent."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    dims = tl.arange(0, INNER)
    own_count = tl.load(counts + head)
    within = rows < own_count
    # A block of absent vectors looks at no centroid.
    own_clusters = tl.where(tl.program_id(0) * VECTORS < own_count, tl.load(cluster_counts + head), 0).to(tl.int32)
    own_vectors = tl.load(
        vectors + (head * count + rows)[:, None] * HEAD_DIM + dims[None, :],
        mask=within[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    best = tl.full((VECTORS,), float("-inf"), dtype=tl.float32)
    label = tl.zeros((VECTORS,), dtype=tl.int32)
    columns = tl.arange(0, CENTROIDS)
    targets = centroids + (head * clusters + columns)[None, :] * HEAD_DIM + dims[:, None]
    for start in range(0, own_clusters, CENTROIDS):
        present = start + columns < own_clusters
        target = tl.load(targets, mask=present[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        # Three products of 11-bit parts are as good as float32, and run on tensor cores.
        products = tl.dot(own_vectors, target, input_precision="tf32x3")
        products = tl.where(present[None, :], products, float("-inf"))
        value, place = tl.max(products, axis=1, return_indices=True, return_indices_tie_break_left=True)
        better = value > best  # strictly: the lower centroid wins a tie
        label = tl.where(better, start + place, label)
        best = tl.maximum(best, value)
        targets += CENTROIDS * HEAD_DIM
    label = tl.where(within, label, clusters)
    tl.store(nearest + head * count + rows, label.to(tl.int64), mask=rows < count)
    tl.store(own + head * count + rows, best, mask=rows < count)


@triton.jit(do_not_specialize=["count", "clusters"])
def _settle(
    nearest: tl.tensor, own: tl.tensor, cluster_counts: tl.tensor, labels: tl.tensor, order: tl.tensor,
    offsets: tl.tensor, count: tl.tensor, clusters: tl.tensor,
    VECTORS: tl.constexpr, CENTROIDS: tl.constexpr,
) -> None:  # fmt: skip
    """Labels of one problem after every empty cluster has taken a vector, and its vectors in order of them."""
    problem = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, VECTORS), tl.arange(0, CENTROIDS)
    there = rows < count
    # What is no vector comes behind those that are absent.
    label = tl.load(nearest + problem * count + rows, mask=there, other=clusters + 1).to(tl.int32)
    product = tl.load(own + problem * count + rows, mask=there, other=0.0)
    members = tl.sum((label[None, :] == columns[:, None]).to(tl.int32), axis=1)
    empty = ((columns < tl.load(cluster_counts + problem)) & (members == 0)).to(tl.int32)
    if tl.sum(empty, axis=0) > 0:
        # By product, ties by number, all but the last of each cluster are spare: as `refill` has it.
        tied = product[:, None] == product[None, :]
        later = (product[None, :] > product[:, None]) | (tied & (rows[None, :] > rows[:, None]))
        alike = label[:, None] == label[None, :]
        spare = (tl.max((alike & later).to(tl.int32), axis=1) > 0) & (label < clusters)
        turn = tl.sum((later & spare[:, None]).to(tl.int32), axis=0)
        waiting = tl.cumsum(empty, axis=0) - empty
        taking = (waiting[None, :] == turn[:, None]) & (empty > 0)[None, :] & spare[:, None]
        target = tl.sum(tl.where(taking, columns[None, :], 0), axis=1)
        label = tl.where(tl.max(taking.to(tl.int32), axis=1) > 0, target, label)
    before = (label[None, :] < label[:, None]) | ((label[None, :] == label[:, None]) & (rows[None, :] < rows[:, None]))
    place = tl.sum(before.to(tl.int32), axis=1)
    tl.store(labels + problem * count + rows, label.to(tl.int64), mask=there)
    tl.store(order + problem * count + place, rows, mask=there)
    begin = tl.sum((label[None, :] < columns[:, None]).to(tl.int32), axis=1)
    tl.store(offsets + problem * (clusters + 1) + columns, begin, mask=columns < clusters)
    tl.store(offsets + problem * (clusters + 1) + clusters, tl.sum((label < clusters).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["count", "clusters"])
def _move(
    vectors: tl.tensor,
    order: tl.tensor,
    offsets: tl.tensor,
    centroids: tl.tensor,
    count: tl.tensor,
    clusters: tl.tensor,
    HEAD_DIM: tl.constexpr,
    INNER: tl.constexpr,
    MEMBERS: tl.constexpr,
) -> None:
    """One cluster's centroid from its members, which are neighbours in `order`."""
    head = tl.program_id(1).to(tl.int64)
    cluster = tl.program_id(0)
    dims = tl.arange(0, INNER)
    inside = dims < HEAD_DIM
    bounds = offsets + head * (clusters + 1) + cluster
    first, last = tl.load(bounds), tl.load(bounds + 1)
    total = tl.zeros((INNER,), dtype=tl.float32)
    for start in range(first, last, MEMBERS):
        places = start + tl.arange(0, MEMBERS)
        rows = tl.load(order + head * count + places, mask=places < last, other=0)
        members = tl.load(
            vectors + (head * count + rows)[:, None] * HEAD_DIM + dims[None, :],
            mask=(places < last)[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.sum(members, axis=0)
    length = tl.sqrt_rn(tl.sum(total * total, axis=0))
    if length > 0:
        tl.store(centroids + (head * clusters + cluster) * HEAD_DIM + dims, tl.div_rn(total, length), mask=inside)
