"""Spherical k-means on CUDA, three launches an iteration; and means of sets of vectors in one.

Nothing is added up by atomics, and a problem's programs know nothing of others: its result is that of it alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._kmeans import Sizes, first_centroids
from saccade.kernels._triton.operands import LEAST_DIM

LEAST = 2048
"""Vectors that kernels are compiled for at least: blocks of all sizes up to a usual group's share them."""
MEMBERS = 1024
"""Numbers of a set's members that are read at a time: of 8 vectors of 128, each one the next of every eighth."""


def spherical_kmeans(vectors: Tensor, clusters: int, iterations: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    vectors = vectors.contiguous()
    (problems, count, head_dim), (centroids, _) = vectors.shape, first_centroids(vectors, clusters, sizes)
    own = torch.empty((problems, count), dtype=torch.float32, device=vectors.device)
    labels, padded, inner = torch.empty_like(own, dtype=torch.int32), _padded(count), _padded(head_dim, LEAST_DIM)
    block, columns, warps = tiles(vectors.device, inner)
    with torch.cuda.device_of(vectors):
        for _ in range(iterations):
            _assign[(problems * triton.cdiv(count, block),)](
                vectors, centroids, *sizes, labels, own, count, clusters,
                HEAD_DIM=head_dim, INNER=inner, VECTORS=block, CENTROIDS=columns, num_warps=warps, num_stages=2,
            )  # fmt: skip
            _settle[(problems,)](
                labels, own, *sizes, count, clusters, VECTORS=padded,
                SETS=max(triton.next_power_of_2(clusters + 1), padded // 2), num_warps=4 if padded == LEAST else 8,
            )  # fmt: skip
            _gathered(vectors, labels, centroids)
    return labels.long(), centroids


def member_means(vectors: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    vectors = vectors.contiguous()
    means = vectors.new_empty((len(vectors), count, vectors.shape[2]))
    spreads = vectors.new_empty(means.shape[:2])
    sizes = torch.empty_like(spreads, dtype=torch.int32)
    with torch.cuda.device_of(vectors):
        _gathered(vectors, labels.int().contiguous(), means, spreads, sizes)
    return means, spreads, sizes


def tiles(device: torch.device, inner: int) -> tuple[int, int, int]:
    """Vectors of a program, centroids that it looks at together, and warps: as much as spills no register.

    Hopper's tensor cores take both from shared memory, others take vectors from registers.
    """
    if inner > 128:
        return 16, 32, 4
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return (64, 32, 4) if hopper or inner <= 64 else (64, 16, 8)


def _padded(count: int, least: int = LEAST) -> int:
    return max(int(triton.next_power_of_2(count)), least)


def _gathered(vectors: Tensor, labels: Tensor, found: Tensor, *more: Tensor) -> None:
    """Of every set its mean and `more`, spread and size; or alone the new centroid."""
    (problems, count, head_dim), inner = vectors.shape, _padded(vectors.shape[2], LEAST_DIM)
    padded, strips = _padded(count), MEMBERS // inner
    _gather[(problems * found.shape[1],)](
        vectors, labels, found, *(more or (found, labels)), count, found.shape[1], HEAD_DIM=head_dim, INNER=inner,
        MEANS=bool(more), PLACES=padded // strips, STRIPS=strips, num_warps=padded // LEAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "clusters"])
def _assign(
    vectors: tl.tensor, centroids: tl.tensor, counts: tl.tensor, made: tl.tensor, labels: tl.tensor, own: tl.tensor,
    count: tl.tensor, clusters: tl.tensor,
    HEAD_DIM: tl.constexpr, INNER: tl.constexpr, VECTORS: tl.constexpr, CENTROIDS: tl.constexpr,
) -> None:  # fmt: skip
    """The lowest centroid of largest inner product of a block of vectors, and that product."""
    blocks = tl.cdiv(count, VECTORS)
    problem, begin = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * VECTORS
    rows, columns, dims = begin + tl.arange(0, VECTORS), tl.arange(0, CENTROIDS), tl.arange(0, INNER)
    there = rows < tl.load(counts + problem)
    wide = dims < HEAD_DIM
    # A block of absent vectors looks at no centroid.
    present = tl.where(begin < tl.load(counts + problem), tl.load(made + problem), 0).to(tl.int32)
    asked = tl.load(
        vectors + (problem * count + rows)[:, None] * HEAD_DIM + dims[None, :],
        mask=there[:, None] & wide[None, :], other=0.0,
    )  # fmt: skip
    best = tl.full((VECTORS,), float("-inf"), dtype=tl.float32)
    label = tl.zeros((VECTORS,), dtype=tl.int32)
    targets = centroids + (problem * clusters + columns)[None, :] * HEAD_DIM + dims[:, None]
    for start in range(0, present, CENTROIDS):
        known = start + columns < present
        target = tl.load(targets + start * HEAD_DIM, mask=known[None, :] & wide[:, None], other=0.0)
        # Three products of 11-bit parts err as float32 does, and run on tensor cores, which "ieee" would not.
        products = tl.dot(asked, target, input_precision="tf32x3")
        products = tl.where(known[None, :], products, float("-inf"))
        value, place = tl.max(products, axis=1, return_indices=True, return_indices_tie_break_left=True)
        # Strictly: the lower centroid wins a tie.
        label = tl.where(value > best, start + place, label)
        best = tl.maximum(best, value)
    tl.store(labels + problem * count + rows, tl.where(there, label, clusters), mask=rows < count)
    tl.store(own + problem * count + rows, best, mask=rows < count)


@triton.jit(do_not_specialize=["count", "clusters"])
def _settle(
    labels: tl.tensor, own: tl.tensor, counts: tl.tensor, made: tl.tensor, count: tl.tensor, clusters: tl.tensor,
    VECTORS: tl.constexpr, SETS: tl.constexpr,
) -> None:  # fmt: skip
    """Every empty cluster in turn takes the vector that is farthest from its own, from a cluster that has two."""
    problem, rows, numbers = tl.program_id(0).to(tl.int64), tl.arange(0, VECTORS), tl.arange(0, SETS)
    there = rows < tl.load(counts + problem)
    label = tl.load(labels + problem * count + rows, mask=there, other=clusters)
    sizes = tl.histogram(label, SETS)
    empties = (sizes == 0) & (numbers < tl.load(made + problem))
    if tl.max(empties.to(tl.int32), axis=0) > 0:
        product = tl.load(own + problem * count + rows, mask=there, other=float("inf"))
        for _ in range(tl.sum(empties.to(tl.int32), axis=0)):
            empty = tl.min(tl.where(empties, numbers, SETS), axis=0)
            spare = there & (tl.gather(sizes, label, 0) > 1)
            least = tl.min(tl.where(spare, product, float("inf")), axis=0)
            taken = rows == tl.min(tl.where(spare & (product == least), rows, VECTORS), axis=0)
            left = tl.sum(tl.where(taken, label, 0), axis=0)
            sizes += (numbers == empty).to(tl.int32) - (numbers == left).to(tl.int32)
            label = tl.where(taken, empty, label)
            empties = empties & (numbers != empty)
        tl.store(labels + problem * count + rows, label, mask=there)


@triton.jit(do_not_specialize=["count", "sets"])
def _gather(
    vectors: tl.tensor, labels: tl.tensor, found: tl.tensor, spreads: tl.tensor, sizes: tl.tensor, count: tl.tensor,
    sets: tl.tensor,
    HEAD_DIM: tl.constexpr, INNER: tl.constexpr, MEANS: tl.constexpr, PLACES: tl.constexpr, STRIPS: tl.constexpr,
) -> None:  # fmt: skip
    """Of one set: mean, root of the mean squared distance from it and size; or the members' normalised sum."""
    at, dims, end = tl.program_id(0).to(tl.int64), tl.arange(0, INNER), PLACES * STRIPS
    problem = at // sets
    place = tl.arange(0, PLACES)[:, None] * STRIPS + tl.arange(0, STRIPS)[None, :]
    label = tl.load(labels + problem * count + place, mask=place < count, other=-1)
    left = tl.where(label == at % sets, place, end)
    size = tl.sum(tl.sum((left < end).to(tl.int32), axis=1), axis=0)
    target, wide = found + at * HEAD_DIM + dims, dims < HEAD_DIM
    mean = tl.zeros((INNER,), dtype=tl.float32)
    for turn in tl.static_range(1 + MEANS):
        total = tl.zeros((STRIPS, INNER), dtype=tl.float32)
        row = tl.min(left, axis=0)
        while tl.min(row, axis=0) < end:
            read = (row < end)[:, None] & wide[None, :]
            members = vectors + (problem * count + row)[:, None] * HEAD_DIM + dims[None, :]
            member = tl.load(members, mask=read, other=0.0)
            away = tl.where(read, member - mean[None, :], 0.0)
            total += away * away if turn else member
            row = tl.min(tl.where(left > row[None, :], left, end), axis=0)
        summed = tl.sum(total, axis=0)
        if turn:
            tl.store(spreads + at, tl.sqrt_rn(tl.sum(summed, axis=0) / tl.maximum(size, 1)))
            tl.store(sizes + at, size)
        elif MEANS:
            mean = summed / tl.maximum(size, 1)
            tl.store(target, mean, mask=wide)
        else:
            length = tl.sqrt_rn(tl.sum(summed * summed, axis=0))
            # Where they cancel out, the centroid stays.
            if length > 0:
                tl.store(target, tl.div_rn(summed, length), mask=wide)
