"""The Triton search of the cluster index, interpreted, on the cases and naive loops of the other implementations."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from compiling import compile_kernel, expect_fit, pointers
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import DEVICES
from test_cluster_search import (
    Case,
    Node,
    Row,
    cases,
    expect,
    expect_same,
    test_rows_search_their_slots,  # noqa: F401 - of the kernels
    test_units_without_tokens_are_none,  # noqa: F401
)

from saccade.errors import KernelError
from saccade.kernels._cluster_tree import SearchWidths
from saccade.kernels.cluster_search import triton
from saccade.kernels.cluster_search.api import cluster_search
from saccade.types import Selection
from walking import drawn

MODULE = "saccade.kernels.cluster_search.triton"
SMALL = {"UNITS": 2, "CANDIDATES": 2, "MEMBERS": 2, "PROGRAMS": 12, "PART": 4, "UNITS_PART": 4, "RANKED": 2}
SMALL |= {"RIVALS": 4, "STEP": 2}
SHIPPED: dict[str, int] = {}


def search(case: Case, blocks: dict[str, int], **changed: object) -> Selection:
    with pytest.MonkeyPatch.context() as patch:
        for name, size in blocks.items():
            patch.setattr(triton, name, size)
        options = {**case.options, **changed}
        return cluster_search(case.q, options.pop("tree", case.tree), case.lengths, **options, implementation="triton")


@drawn(20)
@given(cases(), st.sampled_from((SMALL, SHIPPED)))
def test_against_naive_loops(case: Case, blocks: dict[str, int]) -> None:
    expect(case, search(case, blocks))


@drawn(8)
@given(cases(), st.one_of(st.integers(-8, 20), st.just(10**6)))
def test_host_bounds_change_what_they_change_in_the_reference(case: Case, more: int) -> None:
    clusters, chunks, tokens = (max(width + more, 1) for width in case.widths)
    widths = SearchWidths(clusters, chunks, min(tokens, 200))
    found = search(case, SMALL, widths=widths)
    wanted = cluster_search(
        case.q, case.tree, case.lengths, **{**case.options, "widths": widths}, implementation="reference"
    )
    expect_same(found, wanted)


@drawn(5)
@given(cases())
def test_a_narrowed_tree_gives_the_same_sets(case: Case) -> None:
    whole = search(case, SHIPPED)
    heads = len(case.rows[0].units)
    group = case.q.shape[1] // heads
    for head in range(heads):
        one = replace(case, q=case.q[:, head * group : (head + 1) * group])
        assert search(one, SHIPPED, tree=case.tree.heads(head, head + 1)).ids[:, 0].equal(whole.ids[:, head])


def large(dim: int, budget: int, counts: tuple[int, ...] = (300, 70)) -> Case:
    """Hundreds of clusters of one to many chunks, most of them with a rival of the same bound; exact in float16."""
    chance = random.Random(0)

    def vector() -> list[float]:
        return [chance.randint(-2, 2) / 4 for _ in range(dim)]

    rows = []
    for count in counts:
        edges = [3]
        for _ in range(3 * count):
            edges.append(edges[-1] + chance.randint(1, 16))
        all_units, all_clusters = [], []
        for _ in range(2):
            clusters = [Node(vector(), chance.randint(0, 8) / 8, [number]) for number in range(count)]
            for chunk in range(count, 3 * count):
                clusters[min(chance.randrange(count), chance.randrange(count))].children.insert(0, chunk)
            units = [Node(vector(), chance.randint(0, 8) / 8, [number]) for number in range(count // 6)]
            for number in range(count // 6, count):
                chance.choice(units).children.append(number)
            all_clusters.append(clusters)
            all_units.append(units)
        rows.append(Row(edges[-1] + 29, edges, all_units, all_clusters))
    queries = [[[0.0] * dim for _ in range(2)] for _ in rows]
    for query in (query for heads in queries for query in heads):
        query[chance.randrange(dim // 2)] = 3.0
        query[dim // 2 + chance.randrange(dim // 2)] = -4.0
    return Case(rows, torch.tensor(queries).half(), queries, torch.float16, budget, sinks=3)


@pytest.mark.parametrize(("dim", "budget"), [(64, 400), (80, 900)])
def test_many_clusters(dim: int, budget: int) -> None:
    case = large(dim, budget)
    expect(case, search(case, SHIPPED))


@pytest.mark.parametrize("factor", [1.0, 0.0])
def test_how_much_is_left_out_before_pairs_are_compared_changes_nothing(factor: float) -> None:
    """Nothing, in parts, or as much as can be; below 0.0, too, and where a query of nothing makes all bounds equal."""
    case = large(64, 200, counts=(50, 20))
    case = replace(case, q=factor * case.q)
    for radius in (1.0, -9.0):
        tree = replace(case.tree, radii=radius * case.tree.radii, unit_radii=radius * case.tree.unit_radii)
        wanted = cluster_search(case.q, tree, case.lengths, **case.options, implementation="reference")
        for blocks in ({"SPARE": 1, "PART": 64, "UNITS_PART": 64}, {"SPARE": 10**6, "RANKED": 64}):
            expect_same(search(case, blocks, tree=tree), wanted)


def test_a_tree_that_is_no_slice_of_a_contiguous_one_is_refused() -> None:
    case = large(8, 400)
    tree = replace(case.tree, radii=case.tree.radii.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(KernelError, match=r"radii \[2, 2, 300\] has strides \(600, 1, 2\)"):
        search(case, SHIPPED, tree=tree)


QUERY = {"q": "*bf16", "stride_row": "i32", "stride_head": "i32", "stride_dim": "i32"}
SLOTS = {"slots": "*i32", "heads": "i32", "span": "i32"}
ROW = {**SLOTS, "ends": "*i32", "seq_lens": "*i32", "budget": "i32"}
LISTED = {"members": "*i32", "edges": "*i32", "capacity": "i32", "edges_room": "i32"}
RANKED = {"keys": "*i64", "weights": "*i64", "opens": "*i32"}
FOUND = {"found": "*i32", "clusters": "i32"}
SIGNATURES = {
    "_bound_units": {
        **QUERY, **ROW, **RANKED, "unit_centroids": "*bf16", "unit_radii": "*fp32", "unit_tokens": "*i32",
        "unit_offsets": "*i32", "parents": "i32",
    },
    "_keep_units": {**ROW, **RANKED, **FOUND, "parents": "i32", "limit": "i32", "listed": "*i32"},
    "_bound_clusters": {
        **QUERY, **SLOTS, **LISTED, **RANKED, **FOUND, "listed": "*i32", "centroids": "*bf16", "radii": "*fp32",
        "numbers": "*i32", "offsets": "*i32", "count": "i32",
    },
    "_write_sets": {
        **ROW, **LISTED, **RANKED, **FOUND, "sinks": "i32", "starts": "*i32", "lengths": "*i32", "chunks": "i32",
        "ids": "*i32", "counts": "*i32", "width": "i32",
    },
}  # fmt: skip
NARROWED = {"SPARE": 4, "BLOCK": 64, "RIVALS": 32, "MEMBERS": 8}


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        ("_bound_units", {"GROUP": 4, "HEAD_DIM": 128, "INNER": 128, "BLOCK": 16}),
        ("_keep_units", {**NARROWED, "PART": 1024}),
        ("_bound_clusters", {"GROUP": 4, "HEAD_DIM": 128, "INNER": 128, "BLOCK": 32, "MEMBERS": 8}),
        ("_bound_clusters", {"GROUP": 7, "HEAD_DIM": 64, "INNER": 64, "BLOCK": 32, "MEMBERS": 8}),
        ("_write_sets", {**NARROWED, "PART": 512, "STEP": 16}),
    ],
)
def test_compiles_without_spills(kernel: str, constants: dict[str, int], capability: int) -> None:
    signature = SIGNATURES[kernel]
    compiled = compile_kernel(MODULE, kernel, signature, constants, pointers(signature), capability=capability)
    expect_fit(compiled, 168)  # of 12 warps on a multiprocessor
