"""Spherical k-means against naive float64 loops written from the rules of CLUSTER.md (LycheeCluster, section 4.3)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels.spherical_kmeans import cpu, reference, spherical_kmeans

implementations = st.sampled_from(("reference", "cpu"))

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


@given(st.lists(st.integers(0, 4), min_size=2, max_size=16), st.integers(1, 16), st.integers(1, 4), implementations)
def test_ties_and_empty_clusters(axes: list[int], clusters: int, iterations: int, implementation: str) -> None:
    """Axes of space, and zero: products are exact, equal vectors leave clusters empty, which then must be refilled."""
    vectors = torch.zeros(1, len(axes), 4)
    for place, axis in enumerate(axes):
        if axis < 4:
            vectors[0, place, axis] = 1.0
    expect(vectors, min(clusters, len(axes)), iterations, implementation)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_opposite_vectors_keep_the_centroid(implementation: str) -> None:
    vectors = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    labels, centroids = spherical_kmeans(vectors, 1, implementation=implementation)
    assert labels.tolist() == [[0, 0]]
    assert centroids.tolist() == [[[1.0, 0.0]]]


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
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
    results = [module.spherical_kmeans(vectors, 20, 10) for module in (reference, cpu)]
    assert results[0][0].equal(results[1][0])
    assert torch.allclose(results[0][1], results[1][1], atol=1e-6)


def test_errors() -> None:
    vectors = torch.randn(1, 4, 2)
    with pytest.raises(KernelError, match=r"clusters must be 1 to 4, got 5"):
        spherical_kmeans(vectors, 5)
    with pytest.raises(KernelError, match=r"clusters must be 1 to 4, got 0"):
        spherical_kmeans(vectors, 0)
    with pytest.raises(KernelError, match=r"iterations must be at least 1, got 0"):
        spherical_kmeans(vectors, 2, iterations=0)
    with pytest.raises(KernelError, match=r"must be float32 \[H, N, d\], got torch.bfloat16"):
        spherical_kmeans(vectors.bfloat16(), 2)
    with pytest.raises(KernelError, match="unknown implementation 'native'"):
        spherical_kmeans(vectors, 2, implementation="native")
