"""Spherical k-means against naive float64 loops written from the paper (LycheeCluster, section 4.3)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_checks import fast_attention
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._native import library
from saccade.kernels.spherical_kmeans import cpu, native, reference
from saccade.kernels.spherical_kmeans.api import spherical_kmeans

built = "native" in fast_attention
all_implementations = ("reference", *fast_attention)
implementations = st.sampled_from(all_implementations)
modules = (reference, cpu, native) if built else (reference, cpu)

# Vectors have unit length: an inner product of 8 terms errs by at most gamma(9) < 1e-6 in float32, a centroid's
# component by a few units more in each of 10 iterations. Decisions closer than this may fall either way.
MARGIN = 2e-5


class CloseDecisionError(Exception):
    """Two numbers are so near, but not equal, that float32 may order them differently."""


def before(one: float, other: float) -> bool:
    """Whether one < other, if float32 must agree."""
    if one != other and abs(one - other) < MARGIN:
        raise CloseDecisionError
    return one < other


def naive(vectors: list[list[float]], clusters: int, iterations: int) -> tuple[list[int], list[list[float]]]:
    count = len(vectors)
    centroids = [list(vectors[i * count // clusters]) for i in range(clusters)]
    labels: list[int] = []
    for _ in range(iterations):
        labels, own = [], []
        for vector in vectors:
            best, top = 0, dot(vector, centroids[0])
            for number in range(1, clusters):
                product = dot(vector, centroids[number])
                if before(top, product):
                    best, top = number, product
            labels.append(best)
            own.append(top)
        for empty in [number for number in range(clusters) if number not in labels]:
            taken = None
            for index in range(count):
                if labels.count(labels[index]) >= 2 and (taken is None or before(own[index], own[taken])):
                    taken = index
            assert taken is not None
            labels[taken] = empty
        for number in range(clusters):
            members = [vector for vector, label in zip(vectors, labels, strict=True) if label == number]
            mean = [math.fsum(column) / len(members) for column in zip(*members, strict=True)]
            length = math.sqrt(dot(mean, mean))
            if 0 < length < MARGIN:
                raise CloseDecisionError
            if length > 0:
                centroids[number] = [component / length for component in mean]
    return labels, centroids


def dot(one: list[float], other: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def expect(vectors: Tensor, clusters: int, iterations: int, implementation: str) -> None:
    labels, centroids = spherical_kmeans(vectors, clusters, iterations=iterations, implementation=implementation)
    assert labels.shape == vectors.shape[:2]
    assert centroids.shape == (vectors.shape[0], clusters, vectors.shape[2])
    for head, content in enumerate(vectors.double().tolist()):
        try:
            wanted, wanted_centroids = naive(content, clusters, iterations)
        except CloseDecisionError:
            assume(False)
        assert labels[head].tolist() == wanted
        error = (centroids[head].double() - torch.tensor(wanted_centroids, dtype=torch.float64)).abs().max()
        assert error <= MARGIN / 10


def unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


@given(
    st.integers(1, 2), st.integers(1, 30), st.integers(1, 8), st.integers(1, 10), st.integers(0, 2**31), implementations
)
def test_against_float64(heads: int, count: int, size: int, iterations: int, seed: int, implementation: str) -> None:
    random = torch.Generator().manual_seed(seed)
    vectors = unit(torch.randn(heads, count, 8, generator=random))
    expect(vectors, -(-count // size), iterations, implementation)


axes = st.lists(st.tuples(st.integers(0, 4), st.sampled_from((1.0, 1.0, 2.0, 4.0))), min_size=2, max_size=16)


@given(axes, st.integers(1, 16), st.integers(1, 4), implementations)
def test_ties_and_empty_clusters(
    axes: list[tuple[int, float]], clusters: int, iterations: int, implementation: str
) -> None:
    """Axes of space, and zero: products are exact, equal vectors leave clusters empty, which then must be refilled.

    Lengths other than 1 let vectors leave the cluster that they began in: centroids that have moved tie with others.
    """
    vectors = torch.zeros(1, len(axes), 4)
    for place, (axis, length) in enumerate(axes):
        if axis < 4:
            vectors[0, place, axis] = length
    expect(vectors, min(clusters, len(axes)), iterations, implementation)


@pytest.mark.parametrize("implementation", all_implementations)
def test_opposite_vectors_keep_the_centroid(implementation: str) -> None:
    vectors = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    labels, centroids = spherical_kmeans(vectors, 1, implementation=implementation)
    assert labels.tolist() == [[0, 0]]
    assert centroids.tolist() == [[[1.0, 0.0]]]


@pytest.mark.parametrize("implementation", all_implementations)
def test_no_cluster_is_empty(implementation: str) -> None:
    vectors = unit(torch.randn(3, 200, 4)).index_select(1, torch.arange(200) // 5)
    labels, _ = spherical_kmeans(vectors, 150, implementation=implementation)
    assert all(len(set(head)) == 150 for head in labels.tolist())


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = unit(torch.randn(2, 90, 16))
    whole = [module.spherical_kmeans(vectors, 40, 10) for module in (reference, cpu)]
    for module in (reference, cpu):
        monkeypatch.setattr(module, "BLOCK_BYTES", 4 * 2 * 40 * 7)
    for module, (labels, centroids) in zip((reference, cpu), whole, strict=True):
        again = module.spherical_kmeans(vectors, 40, 10)
        assert again[0].equal(labels)
        assert again[1].equal(centroids)


def test_implementations_agree_where_clusters_keep_moving() -> None:
    vectors = unit(torch.randn(2, 400, 16) + 3 * torch.randn(2, 1, 16))
    results = [module.spherical_kmeans(vectors, 20, 10) for module in modules]
    for labels, centroids in results[1:]:
        assert labels.equal(results[0][0])
        assert torch.allclose(centroids, results[0][1], atol=1e-6)


shapes = st.sampled_from(((1, 1, 3), (2, 7, 5), (1, 13, 16), (2, 100, 33), (1, 250, 8), (1, 700, 4)))


@pytest.mark.skipif(not built, reason="no library was built")
@pytest.mark.parametrize("lanes", [4, 8, 16])
@given(shapes, st.integers(1, 4), st.integers(0, 2**31))
def test_ties_of_every_width(lanes: int, shape: tuple[int, int, int], size: int, seed: int) -> None:
    """Small whole numbers: products are exact, so that equal ones are equal for every order of adding up."""
    heads, count, dim = shape
    vectors = torch.randint(-1, 2, (heads, count, dim), generator=torch.Generator().manual_seed(seed)).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "widest", lanes)
        labels, _ = native.spherical_kmeans(vectors, -(-count // size), 1)
    assert labels.equal(reference.spherical_kmeans(vectors, -(-count // size), 1)[0])


@pytest.mark.parametrize("implementation", all_implementations)
@given(shapes, st.integers(1, 20), st.integers(2, 10), st.integers(0, 2**31))
def test_every_vector_is_with_the_nearest_centroid(
    implementation: str, shape: tuple[int, int, int], size: int, iterations: int, seed: int
) -> None:
    """Of those before the last iteration, whatever an implementation left out because it could not have changed."""
    heads, count, dim = shape
    vectors = unit(torch.randn(heads, count, dim, generator=torch.Generator().manual_seed(seed)))
    clusters = -(-count // size)
    _, before = spherical_kmeans(vectors, clusters, iterations=iterations - 1, implementation=implementation)
    labels, _ = spherical_kmeans(vectors, clusters, iterations=iterations, implementation=implementation)
    products = vectors.double() @ before.double().transpose(1, 2)
    own = products.gather(2, labels[..., None])[..., 0]
    # Who fills an empty cluster is alone there, and need not be near it.
    alone = labels.new_zeros(heads, clusters).scatter_add_(1, labels, torch.ones_like(labels)).gather(1, labels) == 1
    assert ((products.amax(dim=2) - own < MARGIN / 10) | alone).all()


@pytest.mark.skipif(not built, reason="no library was built")
def test_threads_change_nothing() -> None:
    vectors = unit(torch.randn(2, 900, 32))
    alone = native.spherical_kmeans(vectors, 300, 10)
    torch.set_num_threads(2)
    try:
        shared = native.spherical_kmeans(vectors, 300, 10)
    finally:
        torch.set_num_threads(1)
    assert shared[0].equal(alone[0])
    assert shared[1].equal(alone[1])


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = torch.randn(1, 4, 2)
    with pytest.raises(KernelError, match=r"clusters must be 1 to 4, got 5"):
        spherical_kmeans(vectors, 5)
    with pytest.raises(KernelError, match=r"clusters must be 1 to 4, got 0"):
        spherical_kmeans(vectors, 0)
    with pytest.raises(KernelError, match=r"iterations must be at least 1, got 0"):
        spherical_kmeans(vectors, 2, iterations=0)
    with pytest.raises(KernelError, match=r"must be float32 \[H, N, d\], got torch.bfloat16"):
        spherical_kmeans(vectors.bfloat16(), 2)
    with pytest.raises(KernelError, match="unknown implementation 'fast'; use auto, reference, native, cpu or triton"):
        spherical_kmeans(vectors, 2, implementation="fast")
    monkeypatch.setattr(library, "library", lambda: None)
    with pytest.raises(KernelError, match="no library was built"):
        spherical_kmeans(vectors, 2, implementation="native")
