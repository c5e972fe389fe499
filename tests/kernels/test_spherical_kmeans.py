"""Spherical k-means against naive float64 loops written from the paper (LycheeCluster, section 4.3)."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_checks import every_implementation, fast_attention, fewer, threads
from kernel_checks import every_index as all_implementations
from kernel_checks import index_implementations as implementations
from torch import Tensor

from methods.oracles_cluster import PRODUCT_ERROR, Margin, k_means
from saccade.errors import KernelError
from saccade.kernels._native import library
from saccade.kernels.spherical_kmeans.api import member_means, spherical_kmeans

built = "native" in fast_attention

# Vectors have unit length: an inner product of 8 terms errs by at most gamma(9) < 1e-6 in float32, a centroid's
# component by a few units more in each of 10 iterations. Decisions closer than this may fall either way.
MARGIN = 2e-5


def expect_problem(vectors: Tensor, made: int, iterations: int, labels: Tensor, centroids: Tensor) -> None:
    """One problem against float64."""
    margin = Margin(exact_ties=True)
    wanted_centroids, wanted = k_means([*vectors.double().cpu().numpy()], made, margin, iterations)
    assume(margin.smallest * PRODUCT_ERROR >= MARGIN)
    assert labels.tolist() == wanted
    assert np.abs(centroids.double().cpu().numpy() - np.array(wanted_centroids)).max() <= MARGIN / 10


def expect_parts(vectors: Tensor, sizes: list[tuple[int, int]], iterations: int, implementation: str) -> None:
    """Problems of the first n vectors and l clusters: each against float64 alone, the rest of its memory poisoned."""
    width, clusters = vectors.shape[1], max(1, *(made for _, made in sizes))
    poisoned = vectors.clone()
    for problem, (count, _) in enumerate(sizes):
        poisoned[problem, count:] = math.nan if problem % 2 else -7.0
    counts, cluster_counts = torch.tensor(sizes, dtype=torch.int32, device=vectors.device).unbind(1)
    labels, centroids = spherical_kmeans(
        poisoned,
        clusters,
        counts=counts,
        cluster_counts=cluster_counts.long(),
        iterations=iterations,
        implementation=implementation,
    )
    assert labels.shape == (len(sizes), width)
    assert centroids.shape == (len(sizes), clusters, vectors.shape[2])
    for problem, (count, made) in enumerate(sizes):
        assert labels[problem, count:].tolist() == [clusters] * (width - count)
        assert not centroids[problem, made:].any()
        if count:
            own = labels[problem, :count], centroids[problem, :made]
            expect_problem(vectors[problem, :count], made, iterations, *own)


def expect(vectors: Tensor, clusters: int, iterations: int, implementation: str) -> None:
    labels, centroids = spherical_kmeans(vectors, clusters, iterations=iterations, implementation=implementation)
    assert labels.shape == vectors.shape[:2]
    assert centroids.shape == (vectors.shape[0], clusters, vectors.shape[2])
    for own in zip(vectors, labels, centroids, strict=True):
        expect_problem(own[0], clusters, iterations, *own[1:])


def unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


@fewer(10)
@given(
    st.integers(1, 2), st.integers(1, 30), st.integers(1, 8), st.integers(1, 10), st.integers(0, 2**31), implementations
)
def test_against_float64(heads: int, count: int, size: int, iterations: int, seed: int, implementation: str) -> None:
    random = torch.Generator().manual_seed(seed)
    vectors = unit(torch.randn(heads, count, 8, generator=random))
    expect(vectors, -(-count // size), iterations, implementation)


axes = st.lists(st.tuples(st.integers(0, 4), st.sampled_from((1.0, 1.0, 2.0, 4.0))), min_size=2, max_size=16)


@fewer(10)
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


# The whole width, one vector, none, and odd numbers, with fewer clusters than another problem has.
parts = st.lists(
    st.one_of(st.sampled_from((0, 1, 17)), st.integers(0, 17)).flatmap(
        lambda count: st.tuples(st.just(count), st.integers(min(count, 1), count))
    ),
    min_size=2,
    max_size=4,
)


@fewer(10)
@given(parts, st.integers(1, 10), st.integers(0, 2**31), implementations)
def test_parts_against_float64(sizes: list[tuple[int, int]], iterations: int, seed: int, implementation: str) -> None:
    chance = torch.Generator().manual_seed(seed)
    expect_parts(unit(torch.randn(len(sizes), 17, 8, generator=chance)), sizes, iterations, implementation)


@fewer(10)
@given(parts, st.integers(1, 4), st.integers(0, 2**31), implementations)
def test_parts_with_ties_and_empty_clusters(
    sizes: list[tuple[int, int]], iterations: int, seed: int, implementation: str
) -> None:
    axes = torch.randint(0, 5, (len(sizes), 17), generator=torch.Generator().manual_seed(seed))
    expect_parts(torch.eye(5, 4)[axes], sizes, iterations, implementation)


@every_implementation
@pytest.mark.parametrize("threads_used", [1, 3])
def test_parts_are_what_they_are_alone(implementation: str, threads_used: int) -> None:
    """Bit by bit, but for products in plain torch, whose rounding depends on the shape of the whole matrix."""
    vectors = unit(torch.randn(24, 128, 32, generator=torch.Generator().manual_seed(0)))
    counts = torch.tensor([128, 0, 1, 77, 2, 128, 100, 3] * 3)
    cluster_counts = -(-counts // 2)
    with threads(threads_used):
        labels, centroids = spherical_kmeans(
            vectors, 64, counts=counts, cluster_counts=cluster_counts, implementation=implementation
        )
    for problem, (count, made) in enumerate(zip(counts.tolist(), cluster_counts.tolist(), strict=True)):
        if count:
            alone = spherical_kmeans(vectors[problem : problem + 1, :count], made, implementation=implementation)
            assert labels[problem, :count].equal(alone[0][0])
            if implementation == "reference":
                assert torch.allclose(centroids[problem, :made], alone[1][0], atol=1e-6)
            else:
                assert centroids[problem, :made].equal(alone[1][0])


@every_implementation
def test_opposite_vectors_keep_the_centroid(implementation: str) -> None:
    vectors = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    labels, centroids = spherical_kmeans(vectors, 1, implementation=implementation)
    assert labels.tolist() == [[0, 0]]
    assert centroids.tolist() == [[[1.0, 0.0]]]


@pytest.mark.parametrize("implementation", all_implementations[:1])
def test_means_are_those_of_loops(implementation: str) -> None:
    """Of 8 sets, one of them empty and one of equal vectors; what is in none is poisoned."""
    chance = torch.Generator().manual_seed(0)
    vectors, labels = 5 + torch.randn(2, 70, 24, generator=chance), torch.randint(1, 9, (2, 70), generator=chance)
    vectors[labels == 8], vectors[labels == 7] = math.nan, 3.0
    means, spreads, sizes = member_means(vectors, labels, 8, implementation=implementation)  # type: ignore[arg-type]
    for problem, number in np.ndindex(2, 8):
        members = vectors[problem][labels[problem] == number].double().numpy()
        mean = members.mean(0) if len(members) else np.zeros(24)
        spread = math.sqrt(((members - mean) ** 2).sum() / max(len(members), 1))
        assert sizes[problem, number] == len(members)
        # Some twenty numbers of at most 10 are added up, and then some twenty squares.
        assert np.abs(means[problem, number].double().numpy() - mean).max() <= 20 * 10 * 2**-24
        assert abs(spreads[problem, number].item() - spread) <= 20 * 10 * 2**-24


@every_implementation
def test_no_cluster_is_empty(implementation: str) -> None:
    vectors = unit(torch.randn(2, 60, 4)).index_select(1, torch.arange(60) // 5)
    labels, _ = spherical_kmeans(vectors, 45, iterations=2, implementation=implementation)
    assert all(len(set(head)) == 45 for head in labels.tolist())


def test_implementations_agree_where_clusters_keep_moving() -> None:
    vectors = unit(torch.randn(2, 400, 16) + 3 * torch.randn(2, 1, 16))
    results = [spherical_kmeans(vectors, 20, implementation=name) for name in all_implementations]
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
        labels, _ = spherical_kmeans(vectors, -(-count // size), iterations=1, implementation="native")
    assert labels.equal(spherical_kmeans(vectors, -(-count // size), iterations=1, implementation="reference")[0])


@every_implementation
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
@pytest.mark.parametrize(("problems", "count", "clusters"), [(2, 900, 300), (40, 128, 64)])
def test_threads_change_nothing(problems: int, count: int, clusters: int) -> None:
    """Those that share a problem, and those that take small ones whole."""
    vectors = unit(torch.randn(problems, count, 32))
    alone = spherical_kmeans(vectors, clusters, implementation="native")
    with threads(3):
        shared = spherical_kmeans(vectors, clusters, implementation="native")
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
    with pytest.raises(KernelError, match=r"must be float32 \[P, N, d\], got torch.bfloat16"):
        spherical_kmeans(vectors.bfloat16(), 2)
    with pytest.raises(KernelError, match="unknown implementation 'fast'; use auto, reference, native or triton"):
        spherical_kmeans(vectors, 2, implementation="fast")
    one = torch.ones(1, dtype=torch.int64)
    for lonely in ({"counts": one}, {"cluster_counts": one}):
        with pytest.raises(KernelError, match="counts and cluster_counts must be given together"):
            spherical_kmeans(vectors, 2, **lonely)
    with pytest.raises(KernelError, match=r"counts must be int32 or int64 \[1\] on cpu, got torch.int64 \[2\]"):
        spherical_kmeans(vectors, 2, counts=one.repeat(2), cluster_counts=one)
    with pytest.raises(KernelError, match=r"cluster_counts must be .* on cpu, got torch.float32 \[1\]"):
        spherical_kmeans(vectors, 2, counts=one, cluster_counts=one.float())
    with pytest.raises(KernelError, match=r"cluster_counts must be .* on cpu, got torch.int64 \[1\] on meta"):
        spherical_kmeans(vectors, 2, counts=one, cluster_counts=one.to("meta"))
    for implementation in all_implementations[1:]:
        for count, made in ((5, 1), (-1, 0), (4, 3), (1, 2), (1, 0), (0, 1), (0, -1)):
            with pytest.raises(KernelError, match=f"problem 0 has {made} clusters of {count} vectors; counts must be"):
                spherical_kmeans(
                    vectors, 2, counts=count * one, cluster_counts=made * one, implementation=implementation
                )
    monkeypatch.setattr(library, "library", lambda: None)
    with pytest.raises(KernelError, match="no library was built"):
        spherical_kmeans(vectors, 2, implementation="native")
