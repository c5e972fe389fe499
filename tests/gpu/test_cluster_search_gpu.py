"""The search of the cluster index and its k-means on a CUDA device: bfloat16, graphs, real sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_budgets import gamma
from test_cluster_search import Case, cases, expect, expect_same
from test_spherical_kmeans import expect as expect_kmeans
from test_spherical_kmeans import expect_parts, parts, unit
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._cluster_tree import ClusterTree, SearchWidths
from saccade.kernels._dispatch import Implementation
from saccade.kernels.cluster_search.api import cluster_search
from saccade.kernels.spherical_kmeans.api import spherical_kmeans
from saccade.types import Selection

BATCH, HEADS, GROUP, DIM, SINKS = 3, 4, 4, 128, 16
WIDTHS = SearchWidths(clusters=700, chunks=125, tokens=1024)
implementations = st.sampled_from(("auto", "triton", "reference"))


def moved(tree: ClusterTree, device: str) -> ClusterTree:
    return ClusterTree(**{name: tensor.to(device) for name, tensor in tree.tensors().items()})


@settings(max_examples=60)
@given(cases(), implementations)
def test_against_naive_loops(case: Case, implementation: Implementation) -> None:
    found = cluster_search(
        case.q.cuda(), moved(case.tree, "cuda"), case.lengths.cuda(), **case.options, implementation=implementation
    )
    expect(case, found)


def forest(seed: int) -> tuple[Tensor, ClusterTree, Tensor]:
    """Queries, trees of 9,800 chunks, lengths: 128K tokens. All bounds are exact in float32, and many are equal."""
    chance = torch.Generator().manual_seed(seed)
    chunks, clusters, units = 9800, 4900, 64

    def parents(children: int, most: int) -> tuple[Tensor, Tensor]:
        """Offsets of `most` nodes with one child or more; the order in which children come."""
        owners = torch.cat(
            (
                torch.arange(most).expand(BATCH, HEADS, -1),
                torch.randint(most, (BATCH, HEADS, children - most), generator=chance),
            ),
            dim=-1,
        )
        # Of a parent the last comes first.
        ranked, order = owners.flip(-1).sort(dim=-1, stable=True)
        order = children - 1 - order
        edges = torch.arange(most + 1).expand(BATCH, HEADS, -1).contiguous()
        return torch.searchsorted(ranked, edges), order

    offsets, members = parents(chunks, clusters)
    unit_offsets, numbers = parents(clusters, units)
    sizes = torch.randint(8, 17, (BATCH, chunks), generator=chance)
    edges = torch.nn.functional.pad(sizes.cumsum(1), (1, 0)) + SINKS
    lengths = sizes[:, None].expand(-1, HEADS, -1).gather(2, members)
    before = torch.nn.functional.pad(lengths.cumsum(2), (1, 0))
    unit_tokens = before.gather(2, offsets).gather(2, unit_offsets).diff(dim=2)

    def quarters(*shape: int) -> Tensor:
        return (torch.randint(-2, 3, (BATCH, HEADS, *shape, DIM), generator=chance) / 4).bfloat16()

    def radii(*shape: int) -> Tensor:
        return torch.randint(0, 9, (BATCH, HEADS, *shape), generator=chance) / 8

    tree = ClusterTree(
        unit_centroids=quarters(units),
        unit_radii=radii(units),
        unit_offsets=unit_offsets.int(),
        unit_tokens=unit_tokens.int(),
        centroids=quarters(clusters),
        radii=radii(clusters),
        numbers=numbers.int(),
        offsets=offsets.int(),
        members=members.int(),
        edges=edges.int(),
        ends=edges[:, -1].int().contiguous(),
    )
    # 64 of 128 components are 1 or -1: the length is 8.
    signs = torch.randint(0, 2, (BATCH, HEADS, DIM), generator=chance) * 2 - 1
    places = torch.rand(BATCH, HEADS, DIM, generator=chance).argsort(dim=-1) < 64
    q = (signs * places).bfloat16().repeat_interleave(GROUP, dim=1)
    return q, tree, tree.ends + torch.tensor([1, 60, 127], dtype=torch.int32)


def on_device(
    q: Tensor, tree: ClusterTree, lengths: Tensor, *, slots: Tensor | None = None, widths: SearchWidths = WIDTHS
) -> Selection:
    options = {"budget": 1024, "sinks": SINKS, "widths": widths, "implementation": "triton"}
    return cluster_search(q, tree, lengths, slots=slots, **options)


def agree(found: Selection, q: Tensor, tree: ClusterTree, lengths: Tensor) -> None:
    wanted = cluster_search(
        *(q.cpu(), moved(tree, "cpu"), lengths.cpu()),
        **{"budget": 1024, "sinks": SINKS, "widths": WIDTHS},
        implementation="reference",
    )
    expect_same(Selection(found.ids.cpu(), found.counts.cpu()), wanted)


def test_long_rows() -> None:
    q, tree, lengths = forest(0)
    found = on_device(q.cuda(), moved(tree, "cuda"), lengths.cuda())
    agree(found, q, tree, lengths)
    heads = on_device(q[:, GROUP : 3 * GROUP].cuda(), moved(tree, "cuda").heads(1, 3), lengths.cuda())
    assert heads.ids.equal(found.ids[:, 1:3])
    widths = WIDTHS._replace(clusters=10**6, chunks=10**6)
    wide = on_device(q.cuda(), moved(tree, "cuda"), lengths.cuda(), widths=widths)
    assert wide.ids.equal(found.ids)
    rows = torch.tensor([2, 0, 2, 1], dtype=torch.int32, device="cuda")
    moved_rows = on_device(q.cuda()[rows], moved(tree, "cuda"), lengths.cuda()[rows], slots=rows)
    assert moved_rows.ids.equal(found.ids[rows])


def test_a_graph_replays_with_other_lengths_and_trees() -> None:
    held = [forest(seed) for seed in (1, 2)]
    q, tree, lengths = held[0][0].cuda(), moved(held[0][1], "cuda"), held[0][2].cuda()
    on_device(q, tree, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = on_device(q, tree, lengths)
    for other_q, other, other_lengths in reversed(held):
        q.copy_(other_q)
        for name, tensor in tree.tensors().items():
            tensor.copy_(other.tensors()[name])
        for length in (other_lengths, other_lengths + 9):
            lengths.copy_(length)
            graph.replay()
            agree(found, q, tree, lengths)
    # A row that is not indexed, and one that the budget holds.
    tree.ends[0] = 0
    lengths[:2] = torch.tensor([1500, 700], device="cuda")
    graph.replay()
    assert found.counts[:2].tolist() == [[1500] * HEADS, [700] * HEADS]
    assert found.ids[0].equal(torch.arange(1024, dtype=torch.int32, device="cuda").expand(HEADS, -1))
    assert found.ids[1, 0].tolist() == [*range(700), *[-1] * 324]
    agree(Selection(found.ids[2:], found.counts[2:]), *last_row(q, tree, lengths))


def last_row(q: Tensor, tree: ClusterTree, lengths: Tensor) -> tuple[Tensor, ClusterTree, Tensor]:
    return q[2:], ClusterTree(**{name: tensor[2:] for name, tensor in tree.tensors().items()}), lengths[2:]


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 4), st.integers(0, 2**31), implementations)
def test_kmeans_against_float64(
    count: int, size: int, iterations: int, seed: int, implementation: Implementation
) -> None:
    vectors = unit(torch.randn(2, count, 8, generator=torch.Generator().manual_seed(seed)))
    expect_kmeans(vectors.cuda(), -(-count // size), iterations, implementation)


def test_kmeans_ties_and_empty_clusters() -> None:
    axes = torch.randint(0, 9, (3, 500), generator=torch.Generator().manual_seed(0))
    vectors = torch.cat((torch.eye(8), torch.zeros(1, 8)))[axes]
    found = spherical_kmeans(vectors.cuda(), 200, iterations=3, implementation="triton")
    wanted = spherical_kmeans(vectors, 200, iterations=3, implementation="reference")
    assert found[0].cpu().equal(wanted[0])
    assert torch.allclose(found[1].cpu(), wanted[1], atol=1e-6)


@settings(max_examples=40)
@given(parts, st.integers(1, 4), st.integers(0, 2**31), implementations)
def test_kmeans_of_parts(
    sizes: list[tuple[int, int]], iterations: int, seed: int, implementation: Implementation
) -> None:
    vectors = unit(torch.randn(len(sizes), 17, 8, generator=torch.Generator().manual_seed(seed)))
    expect_parts(vectors.cuda(), sizes, iterations, implementation)


def test_kmeans_in_a_graph_with_other_counts() -> None:
    """Nothing is read on the host, and every part is bit by bit what it is alone."""
    vectors = unit(torch.randn(64, 128, 128, generator=torch.Generator().manual_seed(0))).cuda()
    held = vectors.clone()
    counts = torch.full((64,), 128, device="cuda")
    cluster_counts = counts // 2
    options: dict[str, Tensor] = {"counts": counts, "cluster_counts": cluster_counts}
    spherical_kmeans(held, 64, **options, implementation="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        labels, centroids = spherical_kmeans(held, 64, **options, implementation="triton")
    for first in (0, 65, 122):
        counts.copy_((torch.arange(64, device="cuda") + first).clamp(max=128))
        cluster_counts.copy_((counts + 1) // 2)
        absent = torch.arange(128, device="cuda") >= counts[:, None]
        held.copy_(vectors.masked_fill(absent[..., None], torch.nan))
        graph.replay()
        assert labels[absent].eq(64).all()
        for problem in range(0, 64, 9):
            count, made = int(counts[problem]), int(cluster_counts[problem])
            assert not centroids[problem, made:].any()
            if count:
                alone = spherical_kmeans(vectors[problem : problem + 1, :count], made, implementation="triton")
                assert labels[problem, :count].equal(alone[0][0])
                assert centroids[problem, :made].equal(alone[1][0])


@pytest.mark.parametrize("head_dim", [128, 80])
def test_kmeans_of_a_long_prompt(head_dim: int) -> None:
    """Every cluster has its first centroid, a vector, as a member: none is refilled, so that labels are the nearest."""
    vectors = unit(torch.randn(2, 5003, head_dim, generator=torch.Generator().manual_seed(0))).cuda()
    labels, centroids = spherical_kmeans(vectors, 2501, iterations=1, implementation="triton")
    assert labels.amin() >= 0
    assert labels.amax() < 2501
    exact = vectors.double()
    first = exact[:, torch.arange(2501, device="cuda") * 5003 // 2501]
    products = exact @ first.transpose(1, 2)
    # Vectors of unit length; a tensor core may cut off where others round, and a factor is in two parts of 11 bits.
    error = 2 * gamma(head_dim) + 3 * 2.0**-20
    assert (products.gather(2, labels[..., None])[..., 0] >= products.amax(dim=2) - 2 * error).all()
    sums = torch.zeros_like(first).scatter_add_(1, labels[..., None].expand_as(exact), exact)
    wanted = sums / sums.norm(dim=-1, keepdim=True)
    assert (centroids - wanted).abs().amax() <= 1e-5
    again = spherical_kmeans(vectors, 2501, iterations=1, implementation="triton")
    assert again[0].equal(labels)
    assert again[1].equal(centroids)


def test_a_tree_on_the_cpu_is_refused() -> None:
    q, tree, lengths = forest(0)
    with pytest.raises(KernelError, match="a tensor is on cpu, not on a CUDA device"):
        on_device(q, tree, lengths)
    with pytest.raises(KernelError, match="must be on one device"):
        on_device(q.cuda(), replace(tree, radii=tree.radii.cuda()), lengths.cuda())
