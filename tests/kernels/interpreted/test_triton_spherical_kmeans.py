"""Triton's spherical k-means, interpreted, on the cases and naive loops of the other implementations."""

from __future__ import annotations

import pytest
import torch
from compiling import compile_kernel, expect_fit, pointers
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_checks import DEVICES
from test_spherical_kmeans import (
    expect,
    expect_parts,
    parts,
    test_opposite_vectors_keep_the_centroid,  # noqa: F401 - of the kernels
    unit,
)

from saccade.kernels.spherical_kmeans import triton
from saccade.kernels.spherical_kmeans.api import spherical_kmeans
from walking import drawn

MODULE = "saccade.kernels.spherical_kmeans.triton"


@drawn(12)
@given(
    *(st.integers(1, 2), st.integers(1, 30), st.integers(1, 8), st.integers(1, 4), st.integers(0, 2**31)),
    *(st.booleans(), st.booleans()),
)
def test_against_float64(
    heads: int, count: int, size: int, iterations: int, seed: int, tiled: bool, compared: bool
) -> None:
    """Where all pairs are compared, and where vectors are sorted."""
    chance = torch.Generator().manual_seed(seed)
    vectors = unit(torch.randn(heads, count, 8, generator=chance))
    with pytest.MonkeyPatch.context() as patch:
        if tiled:
            patch.setattr(triton, "tiles", lambda _device, _inner: triton.Tiles(16, 16, 4))
            patch.setattr(triton, "MEMBERS", 2)
        if not compared:
            patch.setattr(triton, "COMPARED", 0)
        expect(vectors, -(-count // size), iterations, "triton")


@drawn(10)
@example(axes=[0, 1, 2, 3, 4] * 8, clusters=36, iterations=1, compared=True)
@example(axes=[0, 1, 2, 3, 4] * 8, clusters=36, iterations=1, compared=False)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=40), st.integers(1, 40), st.integers(1, 3), st.booleans())
def test_ties_and_empty_clusters(axes: list[int], clusters: int, iterations: int, compared: bool) -> None:
    """Axes of space, and zero: products are exact, so that equal vectors tie, across blocks too."""
    vectors = torch.zeros(1, len(axes), 4)
    for place, axis in enumerate(axes):
        if axis < 4:
            vectors[0, place, axis] = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "tiles", lambda _device, _inner: triton.Tiles(16, 16, 4))
        patch.setattr(triton, "COMPARED", 128 if compared else 0)
        expect(vectors, min(clusters, len(axes)), iterations, "triton")


@drawn(12)
@example(sizes=[(0, 0), (1, 1), (17, 17), (17, 3)], iterations=2, seed=0, tied=False, compared=True)
@example(sizes=[(0, 0), (1, 1), (17, 17), (17, 3)], iterations=2, seed=0, tied=False, compared=False)
@given(parts, st.integers(1, 4), st.integers(0, 2**31), st.booleans(), st.booleans())
def test_parts_against_float64(
    sizes: list[tuple[int, int]], iterations: int, seed: int, tied: bool, compared: bool
) -> None:
    chance = torch.Generator().manual_seed(seed)
    shape = (len(sizes), 17)
    if tied:
        vectors = torch.eye(5, 4)[torch.randint(0, 5, shape, generator=chance)]
    else:
        vectors = unit(torch.randn(*shape, 8, generator=chance))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "tiles", lambda _device, _inner: triton.Tiles(16, 16, 4))
        patch.setattr(triton, "COMPARED", 128 if compared else 0)
        expect_parts(vectors, sizes, iterations, "triton")


def test_parts_are_what_they_are_alone() -> None:
    vectors = unit(torch.randn(5, 40, 16, generator=torch.Generator().manual_seed(0)))
    counts = torch.tensor([40, 0, 1, 33, 18])
    cluster_counts = -(-counts // 2)
    options = {"iterations": 2, "implementation": "triton"}
    labels, centroids = spherical_kmeans(vectors, 20, counts=counts, cluster_counts=cluster_counts, **options)  # type: ignore[arg-type]
    for problem, (count, made) in enumerate(zip(counts.tolist(), cluster_counts.tolist(), strict=True)):
        if count:
            alone = spherical_kmeans(vectors[problem : problem + 1, :count], made, **options)  # type: ignore[arg-type]
            assert labels[problem, :count].equal(alone[0][0])
            assert centroids[problem, :made].equal(alone[1][0])


def test_odd_head_dim_and_many_blocks() -> None:
    vectors = unit(torch.randn(1, 150, 80))
    labels, centroids = spherical_kmeans(vectors, 70, iterations=2, implementation="triton")
    wanted, wanted_centroids = spherical_kmeans(vectors, 70, iterations=2, implementation="reference")
    assert labels.equal(wanted)
    assert torch.allclose(centroids, wanted_centroids, atol=1e-6)


@pytest.mark.parametrize(
    ("capability", "inner", "vectors", "centroids", "warps"),
    [(90, 64, 128, 32, 8), (90, 128, 128, 32, 8), (80, 64, 128, 32, 8), (80, 128, 32, 64, 4), (80, 256, 16, 32, 4)],
)
def test_labels_stream_centroids_without_spills(
    capability: int, inner: int, vectors: int, centroids: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: divmod(capability, 10))
    assert triton.tiles(torch.device("cuda"), inner) == triton.Tiles(vectors, centroids, warps)
    signature = {
        "vectors": "*fp32", "centroids": "*fp32", "counts": "*i64", "cluster_counts": "*i64",
        "nearest": "*i64", "own": "*fp32", "count": "i32", "clusters": "i32",
    }  # fmt: skip
    constants = {"HEAD_DIM": inner, "INNER": inner, "VECTORS": vectors, "CENTROIDS": centroids}
    sizes = {"capability": capability, "warps": warps, "stages": 2}
    compiled = compile_kernel(MODULE, "_assign", signature, constants, pointers(signature), **sizes)
    expect_fit(compiled, 255)
    assert "cp.async" in compiled.ptx


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize(("vectors", "centroids"), [(128, 64), (64, 16)])
def test_pairs_are_compared_in_registers(vectors: int, centroids: int, capability: int) -> None:
    """As planting asks: of 128 chunks and 64 clusters, and of these and 8 units."""
    signature = {
        "nearest": "*i64", "own": "*fp32", "cluster_counts": "*i64", "labels": "*i64", "order": "*i32",
        "offsets": "*i32", "count": "i32", "clusters": "i32",
    }  # fmt: skip
    constants, own = {"VECTORS": vectors, "CENTROIDS": centroids}, pointers(signature)
    compiled = compile_kernel(MODULE, "_settle", signature, constants, own, capability=capability, warps=8)
    # Two registers of the widest wait in the first-level cache.
    assert compiled.spilled <= 8


@pytest.mark.parametrize("capability", DEVICES)
def test_centroids_move_without_spills(capability: int) -> None:
    signature = {
        "vectors": "*fp32", "order": "*i32", "offsets": "*i32", "centroids": "*fp32", "count": "i32", "clusters": "i32",
    }  # fmt: skip
    constants, own = {"HEAD_DIM": 128, "INNER": 128, "MEMBERS": 4}, pointers(signature)
    compiled = compile_kernel(MODULE, "_move", signature, constants, own, capability=capability, warps=1)
    expect_fit(compiled, 96)
