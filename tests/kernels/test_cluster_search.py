"""Cluster search against naive loops over nested lists; all numbers are exact in float32, so that ties are too."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from saccade.errors import KernelError
from saccade.kernels._ranges import lay_out
from saccade.kernels.cluster_search import ClusterTree, SearchWidths, chosen_clusters, cluster_search

DIM = 4


@dataclass
class Node:
    """A unit or cluster: children are clusters' numbers of a unit, chunk numbers of a cluster."""

    centroid: list[float]
    radius: float
    children: list[int]


@dataclass
class Row:
    """One row's index as lists, the same chunks for all heads: `units[head]`, `clusters[head]` by number."""

    length: int
    edges: list[int]
    units: list[list[Node]]
    clusters: list[list[Node]]


def naive(
    row: Row, head: int, query: list[float], budget: int, sinks: int, k_g: int | None
) -> tuple[list[int], list[int]]:
    """Positions and cluster numbers, by CLUSTER.md's tenth point."""
    if row.length <= budget or len(row.edges) < 2:
        return list(range(row.length)), []
    end = row.edges[-1]
    room = budget - sinks - (row.length - 1 - end) - 1
    size = [stop - start for start, stop in zip(row.edges, row.edges[1:], strict=False)]

    def bound(node: Node) -> float:
        product = math.fsum(a * b for a, b in zip(query, node.centroid, strict=True))
        return product + math.hypot(*query) * node.radius

    units = sorted(range(len(row.units[head])), key=lambda number: (-bound(row.units[head][number]), number))
    kept: list[int] = []
    held = 0
    for number in units:
        if len(kept) == k_g or (k_g is None and held >= 4 * budget):
            break
        kept.append(number)
        clusters = row.units[head][number].children
        held += sum(size[chunk] for cluster in clusters for chunk in row.clusters[head][cluster].children)
    candidates = [cluster for unit in kept for cluster in row.units[head][unit].children]
    candidates.sort(key=lambda number: (-bound(row.clusters[head][number]), number))
    chunks: list[int] = []
    chosen: list[int] = []
    full = False
    for cluster in candidates:
        for chunk in sorted(row.clusters[head][cluster].children):
            full = full or size[chunk] > room
            if full:
                break
            room -= size[chunk]
            chunks.append(chunk)
            if cluster not in chosen:
                chosen.append(cluster)
    tokens = [position for chunk in chunks for position in range(row.edges[chunk], row.edges[chunk + 1])]
    return sorted([*range(sinks), *tokens, *range(end, row.length)]), chosen


@dataclass(repr=False)
class Case:
    rows: list[Row]
    q: Tensor
    queries: list[list[list[float]]]
    budget: int
    sinks: int
    k_g: int | None

    @property
    def tree(self) -> ClusterTree:
        return padded(self.rows, self.q.shape[2])

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([row.length for row in self.rows], dtype=torch.int32)

    @property
    def widths(self) -> SearchWidths:
        clusters = max(len(clusters) for row in self.rows for clusters in row.clusters)
        chunks = max(len(row.edges) - 1 for row in self.rows)
        return SearchWidths(max(clusters, 1), max(chunks, 1), max(self.budget, *(row.length for row in self.rows)))

    @property
    def options(self) -> dict[str, object]:
        return {"budget": self.budget, "sinks": self.sinks, "units": self.k_g, "widths": self.widths}


def padded(rows: list[Row], dim: int) -> ClusterTree:
    """The tree of all rows; centroids and radii that no row owns are NaN."""
    batch, heads = len(rows), len(rows[0].units)
    units = max(1, *(len(head) for row in rows for head in row.units))
    clusters = max(1, *(len(head) for row in rows for head in row.clusters))
    chunks = max(1, *(len(row.edges) - 1 for row in rows))

    def ints(*sizes: int) -> Tensor:
        return torch.zeros((batch, *sizes), dtype=torch.int32)

    def nans(*sizes: int) -> Tensor:
        return torch.full((batch, heads, *sizes), torch.nan)

    tree = ClusterTree(
        unit_centroids=nans(units, dim),
        unit_radii=nans(units),
        unit_offsets=ints(heads, units + 1),
        unit_tokens=ints(heads, units),
        unit_weights=ints(heads, units),
        centroids=nans(clusters, dim),
        radii=nans(clusters),
        numbers=ints(heads, clusters),
        offsets=ints(heads, clusters + 1),
        members=ints(heads, chunks),
        edges=ints(chunks + 1),
        ends=ints(),
    )
    for b, row in enumerate(rows):
        if len(row.edges) < 2:
            continue
        tree.edges[b, : len(row.edges)] = torch.tensor(row.edges)
        tree.ends[b] = row.edges[-1]
        for h in range(heads):
            place = member = 0
            for u, unit in enumerate(row.units[h]):
                tree.unit_centroids[b, h, u] = torch.tensor(unit.centroid)
                tree.unit_radii[b, h, u] = unit.radius
                for number in unit.children:
                    cluster = row.clusters[h][number]
                    tree.centroids[b, h, place] = torch.tensor(cluster.centroid)
                    tree.radii[b, h, place] = cluster.radius
                    tree.numbers[b, h, place] = number
                    for chunk in sorted(cluster.children):
                        tree.members[b, h, member] = chunk
                        tree.unit_tokens[b, h, u] += row.edges[chunk + 1] - row.edges[chunk]
                        member += 1
                    place += 1
                    tree.offsets[b, h, place:] = member
                tree.unit_offsets[b, h, u + 1 :] = place
    return tree


@st.composite
def cases(draw: st.DrawFn) -> Case:
    random = draw(st.randoms(use_true_random=False))
    heads, group = draw(st.integers(1, 2)), draw(st.sampled_from((1, 2, 4)))
    sinks = draw(st.integers(0, 3))
    budget = sinks + draw(st.integers(2, 40))
    grain = draw(st.sampled_from((1, 8)))  # coarse numbers tie often

    def vector() -> list[float]:
        return [random.randint(-2 * grain, 2 * grain) / grain for _ in range(DIM)]

    def node() -> Node:
        return Node(vector(), random.randint(0, 2 * grain) / grain, [])

    def row() -> Row:
        chunks = random.randint(0, 14)
        edges = [sinks]
        for _ in range(chunks):
            edges.append(edges[-1] + random.randint(1, 6))
        # At least the current token lies behind the last chunk, and at most what leaves a room of 0 or more.
        length = edges[-1] + random.randint(1, max(1, min(5, budget - sinks)))
        count = max(1, min(chunks, random.randint(1, 8)))
        all_units, all_clusters = [], []
        for _ in range(heads):
            clusters, units = [node() for _ in range(count)], [node() for _ in range(random.randint(1, count))]
            for number in range(count):
                unit = units[number] if number < len(units) else random.choice(units)
                unit.children.append(number)
            for chunk in range(chunks):
                cluster = clusters[chunk] if chunk < count else random.choice(clusters)
                cluster.children.append(chunk)
            order = list(range(count))
            random.shuffle(order)
            clusters = [clusters[number] for number in order]
            for unit in units:
                unit.children = sorted(order.index(number) for number in unit.children)
            all_units.append(units)
            all_clusters.append(clusters)
        return Row(length, edges, all_units, all_clusters)

    rows = [row() for _ in range(draw(st.integers(1, 3)))]
    # The mean of a group is exact, and so is its length: 5, 13 or 0 times a power of two, or an axis.
    shapes = ([3, 4, 0, 0], [0, 0, -5, 12], [0, -1, 0, 0], [0, 0, 0, 0], [2, -2, 2, 2])
    queries = [[[x / 4 for x in random.choice(shapes)] for _ in range(heads)] for _ in rows]
    q = torch.tensor(queries).repeat_interleave(group, dim=1)
    if group > 1:
        shift = torch.randint(-8, 9, q[:, ::group].shape, generator=torch.Generator().manual_seed(0)) / 4
        q[:, ::group] += shift
        q[:, 1::group] -= shift
    return Case(rows, q, queries, budget, sinks, draw(st.sampled_from((None, None, 1, 2, 100))))


@given(cases())
def test_against_naive_loops(case: Case) -> None:
    found = cluster_search(case.q, case.tree, case.lengths, **case.options)
    numbers = chosen_clusters(case.q, case.tree, case.lengths, **case.options)
    assert found.ids.dtype == found.counts.dtype == torch.int32
    assert found.ids.shape[2] == case.widths.tokens
    for b, row in enumerate(case.rows):
        for head, query in enumerate(case.queries[b]):
            tokens, clusters = naive(row, head, query, case.budget, case.sinks, case.k_g)
            assert int(found.counts[b, head]) == len(tokens)
            assert found.ids[b, head].tolist() == tokens + [-1] * (case.widths.tokens - len(tokens))
            assert [number for number in numbers[b, head].tolist() if number >= 0] == clusters


@settings(max_examples=30)
@given(cases(), st.integers(0, 20))
def test_wider_bounds_change_nothing(case: Case, more: int) -> None:
    narrow = cluster_search(case.q, case.tree, case.lengths, **case.options)
    widths = SearchWidths(*(width + more for width in case.widths))
    wide = cluster_search(case.q, case.tree, case.lengths, **{**case.options, "widths": widths})
    assert wide.counts.equal(narrow.counts)
    assert wide.ids[..., : case.widths.tokens].equal(narrow.ids)
    assert (wide.ids[..., case.widths.tokens :] == -1).all()


@settings(max_examples=30)
@given(cases())
def test_a_narrowed_tree_gives_the_same_sets(case: Case) -> None:
    whole = cluster_search(case.q, case.tree, case.lengths, **case.options)
    heads = len(case.rows[0].units)
    group = case.q.shape[1] // heads
    for head in range(heads):
        q = case.q[:, head * group : (head + 1) * group]
        one = cluster_search(q, case.tree.heads(head, head + 1), case.lengths, **case.options)
        assert one.ids[:, 0].equal(whole.ids[:, head])


def example() -> Case:
    unit = Node([1.0, 0.0, 0.0, 0.0], 0.0, [0])
    cluster = Node([1.0, 0.0, 0.0, 0.0], 0.0, [0, 1])
    row = Row(12, [1, 5, 9], [[unit]], [[cluster]])
    return Case([row], torch.ones(1, 2, DIM), [[[1.0] * DIM]], budget=9, sinks=1, k_g=None)


def test_a_chunk_that_does_not_fit_ends_the_search() -> None:
    case = example()
    found = cluster_search(case.q, case.tree, case.lengths, **case.options)
    assert found.ids[0, 0, : int(found.counts)].tolist() == [0, 1, 2, 3, 4, 9, 10, 11]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), min_size=1, max_size=8), st.integers(1, 20))
def test_ranges_are_laid_out(ranges: list[tuple[int, int]], width: int) -> None:
    first, sizes = torch.tensor(ranges).unbind(1)
    wanted = [first + offset for first, size in ranges for offset in range(size)][:width]
    got = lay_out(first[None, None], sizes[None, None], width)[0, 0].tolist()
    assert got[: len(wanted)] == wanted
    assert all(place < 0 for place in got[len(wanted) :])


def test_the_reference_never_synchronises_with_the_host() -> None:
    """`.item()`, `nonzero` and data-dependent shapes raise on a fake tensor."""
    case = example()
    with FakeTensorMode() as mode:
        tree = ClusterTree(**{name: mode.from_tensor(tensor) for name, tensor in case.tree.tensors().items()})
        q, lengths = mode.from_tensor(case.q), mode.from_tensor(case.lengths)
        found = cluster_search(q, tree, lengths, **case.options)
        assert found.ids.shape == (1, 1, 12)
        assert chosen_clusters(q, tree, lengths, **case.options).shape == (1, 1, 1)


def test_errors() -> None:
    case = example()
    tree, lengths, options = case.tree, case.lengths, case.options
    with pytest.raises(KernelError, match=r"q must be floating point \[1, a multiple of 1, 4\]"):
        cluster_search(case.q[..., :3], tree, lengths, **options)
    with pytest.raises(KernelError, match="q must be floating point"):
        cluster_search(case.q.int(), tree, lengths, **options)
    with pytest.raises(KernelError, match="seq_lens must be int32"):
        cluster_search(case.q, tree, lengths.long(), **options)
    with pytest.raises(KernelError, match="must be on one device"):
        cluster_search(case.q, tree, lengths.repeat(2), **options)
    with pytest.raises(KernelError, match="must be at least 1, got 0"):
        cluster_search(case.q, tree, lengths, **{**options, "budget": 0})
    with pytest.raises(KernelError, match="must be at least 1"):
        cluster_search(case.q, tree, lengths, **{**options, "widths": case.widths._replace(chunks=0)})
    with pytest.raises(KernelError, match="implementation 'cpu' cannot take this call"):
        cluster_search(case.q, tree, lengths, **options, implementation="cpu")
