"""Cluster search against naive loops over nested lists; all numbers are exact in float32, so that ties are too."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import fewer
from torch import Tensor

from methods.oracles_cluster import HeadIndex, Margin, Node, Settings
from saccade.selection.clusters.search import SearchWidths, cluster_search, lay_out
from saccade.selection.clusters.tree import ClusterTree
from saccade.types import Selection

DIM = 4


@dataclass
class Row:
    """One row's index as lists, the same chunks for all heads: `units[head]`, `clusters[head]` by number."""

    length: int
    edges: list[int]
    units: list[list[Node]]
    clusters: list[list[Node]]


def naive(row: Row, head: int, query: list[float], budget: int, sinks: int) -> list[int]:
    """Positions: whole chunks in order, as long as they fit (LycheeCluster, section 4.4, and our ruling on ties)."""
    if row.length <= budget or len(row.edges) < 2:
        return list(range(row.length))
    spans, end = list(pairwise(row.edges)), row.edges[-1]
    index = HeadIndex(Settings(budget, sinks), Margin(), spans, clusters=row.clusters[head], units=row.units[head])
    chosen = index.search(np.array(query), budget - sinks - (row.length - end))
    return sorted([*range(sinks), *(token for span in chosen for token in range(*span)), *range(end, row.length)])


@dataclass(repr=False)
class Case:
    rows: list[Row]
    q: Tensor
    queries: list[list[list[float]]]
    dtype: torch.dtype
    budget: int
    sinks: int

    def tree(self, holes: Random | None = None) -> ClusterTree:
        return padded(self.rows, self.q.shape[2], self.dtype, holes)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([row.length for row in self.rows], dtype=torch.int32)

    @property
    def widths(self) -> SearchWidths:
        clusters = max(len(clusters) for row in self.rows for clusters in row.clusters)
        chunks = max(len(row.edges) - 1 for row in self.rows)
        return SearchWidths(max(clusters, 1), max(chunks, 1), max(self.budget, *(row.length for row in self.rows)))

    def search(self, **changes: Any) -> Selection:
        given = {"q": self.q, "tree": self.tree(), "seq_lens": self.lengths, "widths": self.widths}
        return cluster_search(**{**given, "budget": self.budget, "sinks": self.sinks, **changes})


def padded(rows: list[Row], dim: int, dtype: torch.dtype, holes: Random | None) -> ClusterTree:
    """The tree of all rows; centroids and radii that no row owns are NaN, and whole numbers nonsense.

    Holes are units without tokens before, between and behind the others, and clusters that are in no unit.
    """
    batch, heads = len(rows), len(rows[0].units)
    units = max(1, *(len(head) for row in rows for head in row.units))
    clusters = max(1, *(len(head) for row in rows for head in row.clusters))
    chunks = max(1, *(len(row.edges) - 1 for row in rows))
    if holes is not None:
        units, clusters, chunks = 2 * units + 3, clusters + 3 * (units + 3), 2 * chunks

    def ints(*sizes: int) -> Tensor:
        return torch.zeros((batch, *sizes), dtype=torch.int32)

    def junk(*sizes: int) -> Tensor:
        return torch.randint(-(2**30), 2**30, (batch, *sizes), generator=torch.Generator().manual_seed(0)).int()

    def nans(*sizes: int) -> Tensor:
        return torch.full((batch, heads, *sizes), torch.nan)

    tree = ClusterTree(
        unit_centroids=nans(units, dim).to(dtype),
        unit_radii=nans(units),
        unit_offsets=junk(heads, units + 1),
        unit_tokens=ints(heads, units),
        centroids=nans(clusters, dim).to(dtype),
        radii=nans(clusters),
        numbers=junk(heads, clusters),
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
            u = place = member = 0
            for unit in row.units[h]:
                if holes is not None and holes.random() < 0.5:
                    u, place = u + 1, place + holes.randint(0, 3)
                tree.unit_centroids[b, h, u] = torch.tensor(unit.centroid)
                tree.unit_radii[b, h, u] = unit.radius
                tree.unit_offsets[b, h, u : u + 2] = torch.tensor([place, place + len(unit.children)])
                for number in unit.children:
                    cluster = row.clusters[h][number]
                    tree.centroids[b, h, place] = torch.tensor(cluster.centroid)
                    tree.radii[b, h, place] = cluster.radius
                    tree.numbers[b, h, place] = number
                    tree.offsets[b, h, place] = member
                    for chunk in cluster.children:
                        tree.members[b, h, member] = chunk
                        tree.unit_tokens[b, h, u] += row.edges[chunk + 1] - row.edges[chunk]
                        member += 1
                    place += 1
                    tree.offsets[b, h, place] = member
                u += 1
    return tree


@st.composite
def cases(draw: st.DrawFn) -> Case:
    random = draw(st.randoms(use_true_random=False))
    heads, group = draw(st.integers(1, 2)), draw(st.sampled_from((1, 2, 4)))
    sinks = draw(st.integers(0, 3))
    budget = sinks + draw(st.integers(2, 40))
    grain = draw(st.sampled_from((1, 8)))  # coarse numbers tie often
    # The numbers of the first DIM places, spread over all of them: every vector of a wide register counts.
    dim = draw(st.sampled_from((DIM, 16, 48, 64)))
    places = random.sample(range(dim), DIM)

    def spread(numbers: list[float]) -> list[float]:
        vector = [0.0] * dim
        for place, number in zip(places, numbers, strict=True):
            vector[place] = number
        return vector

    def vector() -> list[float]:
        return spread([random.randint(-2 * grain, 2 * grain) / grain for _ in range(DIM)])

    def node() -> Node:
        return Node(np.array(vector()), [], random.randint(0, 2 * grain) / grain)

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
                cluster.children.insert(0, chunk)
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
    queries = [[spread([x / 4 for x in random.choice(shapes)]) for _ in range(heads)] for _ in rows]
    q = torch.tensor(queries).repeat_interleave(group, dim=1)
    if group > 1:
        shift = torch.randint(-8, 9, q[:, ::group].shape, generator=torch.Generator().manual_seed(0)) / 4
        q[:, ::group] += shift
        q[:, 1::group] -= shift
    return Case(rows, q, queries, draw(st.sampled_from((torch.float32, torch.bfloat16))), budget, sinks)


def expect(case: Case, found: Selection) -> None:
    """What naive loops find."""
    assert found.ids.dtype == found.counts.dtype == torch.int32
    assert found.ids.shape[2] == case.widths.tokens
    for b, row in enumerate(case.rows):
        for head, query in enumerate(case.queries[b]):
            tokens = naive(row, head, query, case.budget, case.sinks)
            assert int(found.counts[b, head]) == len(tokens)
            assert found.ids[b, head].tolist() == tokens + [-1] * (case.widths.tokens - len(tokens))


@given(cases(), st.none() | st.randoms(use_true_random=False))
def test_against_naive_loops(case: Case, holes: Random | None) -> None:
    expect(case, case.search(tree=case.tree(holes)))


@fewer(10)
@given(cases(), st.data())
def test_rows_search_their_slots(case: Case, data: st.DataObject) -> None:
    """A batch of some of the rows, each with the tree that lies where the slot says, behind one of nobody."""
    rows = data.draw(st.lists(st.integers(0, len(case.rows) - 1), min_size=1, max_size=5))
    whole, heads = case.search(), case.tree().radii.shape[1]
    # A part of the heads of a tree of more slots than there are rows, the first full of nonsense.
    spread = {
        name: torch.cat((torch.full_like(t[:1], -1 if t.dtype == torch.int32 else torch.nan), t.flip(0)))
        for name, t in case.tree().tensors().items()
    }
    spread = {name: torch.cat((t, t), dim=1) if t.dim() > 2 else t for name, t in spread.items()}
    spread["edges"] = torch.nn.functional.pad(spread["edges"], (0, 3), value=-1)  # of a table with more room
    tree = ClusterTree(**spread).heads(heads, 2 * heads)
    slots = torch.tensor([len(case.rows) - row for row in rows], dtype=torch.int32)
    found = case.search(q=case.q[rows], tree=tree, seq_lens=case.lengths[rows], slots=slots)
    assert found.counts.equal(whole.counts[rows]) and found.ids.equal(whole.ids[rows])


@settings(max_examples=30)
@given(cases(), st.one_of(st.integers(0, 20), st.just(10**6)))
def test_wider_bounds_change_nothing(case: Case, more: int) -> None:
    narrow, (clusters, chunks, tokens) = case.search(), case.widths
    wide = case.search(widths=SearchWidths(clusters + more, chunks + more, tokens + more % 100))
    assert wide.counts.equal(narrow.counts)
    assert wide.ids[..., : case.widths.tokens].equal(narrow.ids)
    assert (wide.ids[..., case.widths.tokens :] == -1).all()


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), min_size=1, max_size=8), st.integers(1, 20))
def test_ranges_are_laid_out(ranges: list[tuple[int, int]], width: int) -> None:
    first, sizes = torch.tensor(ranges).unbind(1)
    wanted = [first + offset for first, size in ranges for offset in range(size)][:width]
    got = lay_out(first[None, None], sizes[None, None], width)[0, 0].tolist()
    assert got[: len(wanted)] == wanted
    assert all(place < 0 for place in got[len(wanted) :])


@settings(max_examples=5)
@given(cases())
def test_the_reference_never_synchronises_with_the_host(case: Case) -> None:
    """`.item()`, `nonzero` and data-dependent shapes raise on a tensor without content; what is on CPU may be read."""
    tree = ClusterTree(**{name: tensor.to("meta") for name, tensor in case.tree().tensors().items()})
    given = {"q": case.q.to("meta"), "tree": tree, "seq_lens": case.lengths.to("meta")}
    for slots in (None, given["seq_lens"]):
        assert case.search(**given, slots=slots).ids.shape[2] == case.widths.tokens
    with pytest.raises(RuntimeError, match="meta"):
        given["seq_lens"].max().item()
