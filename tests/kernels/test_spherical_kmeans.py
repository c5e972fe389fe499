"""Spherical k-means against naive float64 loops written from the paper (LycheeCluster, section 4.3)."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_checks import (
    every_implementation,
    every_index,
    fewer,
    index_implementations,
    needs_the_library,
    refused,
    seeds,
    threads,
)
from torch import Tensor

from methods.oracles_cluster import PRODUCT_ERROR, Margin, k_means
from saccade.kernels._dispatch import Implementation
from saccade.kernels._native import library
from saccade.kernels.spherical_kmeans.api import member_means, spherical_kmeans

# Vectors have unit length: an inner product of 8 terms errs by at most gamma(9) < 1e-6 in float32, a centroid's
# component by a few units more in each of 10 iterations. Decisions closer than this may fall either way.
MARGIN = 2e-5


def unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


# Several vectors, one, none, and odd numbers, with fewer clusters than another problem has.
parts = st.lists(
    st.one_of(st.sampled_from((0, 1, 17)), st.integers(0, 30)).flatmap(
        lambda count: st.tuples(st.just(count), st.integers(min(count, 1), count))
    ),
    min_size=2,
    max_size=4,
)


@pytest.mark.parametrize("tied", [False, True])
@fewer(20)
@given(parts, st.booleans(), st.integers(1, 10), seeds, index_implementations)
def test_against_float64(
    tied: bool, sizes: list[tuple[int, int]], whole: bool, iterations: int, seed: int, implementation: Implementation
) -> None:
    """Problems of the first n vectors and l clusters, the rest of its memory poisoned; `whole`: all of one size.

    Tied vectors are axes of space, and zero: products are exact, equal vectors leave clusters empty, which then must be
    refilled. Lengths other than 1 let vectors leave the cluster that they began in: centroids that have moved tie with
    others.
    """
    chance = torch.Generator().manual_seed(seed)
    sizes = [(max(sizes[0][0], 1), max(sizes[0][1], 1))] * 2 if whole else sizes
    width, clusters = (max(1, *numbers) for numbers in zip(*sizes, strict=True))
    vectors = unit(torch.randn(len(sizes), width, 8, generator=chance))
    if tied:
        axes, powers = (torch.randint(0, 5, vectors.shape[:2], generator=chance) for _ in range(2))
        vectors, iterations = torch.eye(5, 4)[axes] * 2 ** (powers - 2).clamp(min=0)[..., None], -(-iterations // 3)
    counts, made = torch.tensor(sizes, dtype=torch.int32).unbind(1)
    given, told = vectors.clone(), {} if whole else {"counts": counts, "cluster_counts": made.long()}
    for problem, (count, _) in enumerate(sizes):
        given[problem, count:] = math.nan if problem % 2 else -7.0
    how: Any = {"iterations": iterations, "implementation": implementation, **told}
    labels, centroids = spherical_kmeans(given, clusters, **how)
    assert labels.shape == vectors.shape[:2] and centroids.shape == (len(sizes), clusters, vectors.shape[2])
    for problem, (count, made_here) in enumerate(sizes):
        assert labels[problem, count:].tolist() == [clusters] * (width - count)
        assert not centroids[problem, made_here:].any()
        if count:
            margin = Margin(exact_ties=True)
            held = [*vectors[problem, :count].double().numpy()]
            wanted_centroids, wanted = k_means(held, made_here, margin, iterations)
            assume(margin.smallest * PRODUCT_ERROR >= MARGIN)
            assert labels[problem, :count].tolist() == wanted
            found = centroids[problem, :made_here].double().numpy()
            assert np.abs(found - np.array(wanted_centroids)).max() <= MARGIN / 10


@every_implementation
@pytest.mark.parametrize("threads_used", [1, 3])
def test_parts_are_what_they_are_alone(implementation: Implementation, threads_used: int) -> None:
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
def test_opposite_vectors_keep_the_centroid(implementation: Implementation) -> None:
    vectors = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    labels, centroids = spherical_kmeans(vectors, 1, implementation=implementation)
    assert labels.tolist() == [[0, 0]]
    assert centroids.tolist() == [[[1.0, 0.0]]]


@pytest.mark.parametrize("implementation", every_index[:1])
def test_means_are_those_of_loops(implementation: Implementation) -> None:
    """Of 8 sets, one of them empty and one of equal vectors; what is in none is poisoned."""
    chance = torch.Generator().manual_seed(0)
    vectors, labels = 5 + torch.randn(2, 70, 24, generator=chance), torch.randint(1, 9, (2, 70), generator=chance)
    vectors[labels == 8], vectors[labels == 7] = math.nan, 3.0
    means, spreads, sizes = member_means(vectors, labels, 8, implementation=implementation)
    for problem, number in np.ndindex(2, 8):
        members = vectors[problem][labels[problem] == number].double().numpy()
        mean = members.mean(0) if len(members) else np.zeros(24)
        spread = math.sqrt(((members - mean) ** 2).sum() / max(len(members), 1))
        assert sizes[problem, number] == len(members)
        # Some twenty numbers of at most 10 are added up, and then some twenty squares.
        assert np.abs(means[problem, number].double().numpy() - mean).max() <= 20 * 10 * 2**-24
        assert abs(spreads[problem, number].item() - spread) <= 20 * 10 * 2**-24


@every_implementation
def test_no_cluster_is_empty(implementation: Implementation) -> None:
    vectors = unit(torch.randn(2, 60, 4)).index_select(1, torch.arange(60) // 5)
    labels, _ = spherical_kmeans(vectors, 45, iterations=2, implementation=implementation)
    assert all(len(set(head)) == 45 for head in labels.tolist())


shapes = st.sampled_from(((1, 1, 3), (2, 7, 5), (1, 13, 16), (2, 100, 33), (1, 250, 8), (1, 700, 4)))


@needs_the_library
@pytest.mark.parametrize("lanes", [4, 8, 16])
@given(shapes, st.integers(1, 4), seeds)
def test_ties_of_every_width(lanes: int, shape: tuple[int, int, int], size: int, seed: int) -> None:
    """Small whole numbers: products are exact, so that equal ones are equal for every order of adding up."""
    heads, count, dim = shape
    vectors = torch.randint(-1, 2, (heads, count, dim), generator=torch.Generator().manual_seed(seed)).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "widest", lanes)
        labels, _ = spherical_kmeans(vectors, -(-count // size), iterations=1, implementation="native")
    assert labels.equal(spherical_kmeans(vectors, -(-count // size), iterations=1, implementation="reference")[0])


@every_implementation
@given(shapes, st.integers(1, 20), st.integers(2, 10), seeds)
def test_every_vector_is_with_the_nearest_centroid(
    implementation: Implementation, shape: tuple[int, int, int], size: int, iterations: int, seed: int
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


@needs_the_library
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
    vectors, one = torch.randn(1, 4, 2), torch.ones(1, dtype=torch.int64)
    together, both = "counts and cluster_counts must be given together", {"counts": one, "cluster_counts": one}
    refusals: list[tuple[str, dict[str, Any]]] = [
        ("clusters must be 1 to 4, got 5", {"clusters": 5}),
        ("clusters must be 1 to 4, got 0", {"clusters": 0}),
        ("iterations must be at least 1, got 0", {"iterations": 0}),
        (r"must be float32 \[P, N, d\], got torch.bfloat16", {"vectors": vectors.bfloat16()}),
        ("unknown implementation 'fast'; use auto, reference, native or triton", {"implementation": "fast"}),
        (together, {"counts": one}),
        (together, {"cluster_counts": one}),
        (r"counts must be .* \[1\] on cpu, got torch.int64 \[2\]", {**both, "counts": one.repeat(2)}),
        (r"cluster_counts must be .* got torch.float32 \[1\]", {**both, "cluster_counts": one.float()}),
        (r"cluster_counts must be .* got torch.int64 \[1\] on meta", {**both, "cluster_counts": one.to("meta")}),
    ]
    for count, made in ((5, 1), (-1, 0), (4, 3), (1, 2), (1, 0), (0, 1), (0, -1)):
        words = f"problem 0 has {made} clusters of {count} vectors; counts must be"
        given = {"counts": count * one, "cluster_counts": made * one}
        refusals += [(words, {**given, "implementation": name}) for name in every_index[1:]]
    for words, given in refusals:
        refused(words, spherical_kmeans, **{"vectors": vectors, "clusters": 2, **given})
    monkeypatch.setattr(library, "library", lambda: None)
    refused("no library was built", spherical_kmeans, vectors, 2, implementation="native")


def test_implementations_agree_where_clusters_keep_moving() -> None:
    vectors = unit(torch.randn(2, 400, 16) + 3 * torch.randn(2, 1, 16))
    results = [spherical_kmeans(vectors, 20, implementation=name) for name in every_index]
    for labels, centroids in results[1:]:
        assert labels.equal(results[0][0])
        assert torch.allclose(centroids, results[0][1], atol=1e-6)
