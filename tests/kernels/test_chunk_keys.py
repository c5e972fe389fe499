"""Chunk keys in every implementation and layout: means and maxima of the chunks' own slots alone, in float64."""

import math
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_budgets import gamma
from kernel_caches import Case, int32, make_case
from kernel_checks import Run, every_implementation, every_index, every_index_run, needs_the_library, refused, threads
from torch import Tensor

from saccade.kernels._dispatch import Implementation
from saccade.kernels.chunk_keys import api, reference
from saccade.kernels.chunk_keys.api import ChunkPooling, token_keys
from saccade.types import KVView


def table(edges: list[list[int]], device: str = "cpu") -> Tensor:
    """Edges of all rows; a row of fewer chunks repeats its last edge, one of none has some that no row has."""
    width = max(2, *map(len, edges))
    rows = [row or [10**6] for row in edges]
    return int32([row + row[-1:] * (width - len(row)) for row in rows], device)


def chunk_keys(kv: KVView, edges: Tensor, **options: Any) -> Tensor:
    return api.chunk_keys((kv,), edges, **options)[0]


def expect(case: Case, edges: list[list[int]], pooling: ChunkPooling, implementation: Implementation) -> None:
    """A mean of n numbers errs by gamma(n + 1) of their magnitude, the length by gamma(d + 2), the quotient by 1 more.

    So a component of the unit vector errs by that share of the mean magnitudes over the pooled vector's length; and
    the length itself by the same of all components.
    """
    places = table(edges, str(case.kv.k.device))
    longest = max((stop - start for row in edges for start, stop in pairwise(row)), default=1)
    keys = chunk_keys(case.kv, places, pooling=pooling, longest=max(longest, 1), implementation=implementation)
    assert keys.dtype == torch.float32
    assert keys.shape == (len(edges), case.kv.kv_heads, places.shape[1] - 1, case.kv.head_dim)
    spans = [
        (row, number, *span) for row, own in enumerate(places.tolist()) for number, span in enumerate(pairwise(own))
    ]
    for (row, number, start, stop), head in product(spans, range(case.kv.kv_heads)):
        got = keys[row, head, number].double().cpu().numpy()
        own = case.keys[row][head][start:stop] if stop > start else np.zeros((1, case.kv.head_dim))
        pooled = own.max(0) if pooling == "max" else own.mean(0)
        sizes = np.abs(own).mean(0) if pooling == "mean" else np.abs(pooled)
        length = math.sqrt((pooled * pooled).sum())
        if length == 0:
            assert got.tolist() == pooled.tolist()
            continue
        relative = gamma(stop - start + case.kv.head_dim + 5)
        largest = math.sqrt((sizes * sizes).sum()) / length
        allowed = relative * (sizes / length + np.abs(pooled) / length * largest) + 1e-30
        assert (np.abs(got - pooled / length) <= allowed).all()


@st.composite
def edges_of(draw: st.DrawFn, lengths: list[int]) -> list[list[int]]:
    """Ascending positions of each row, often equal ones."""
    return [sorted(draw(st.lists(st.integers(0, length), max_size=8))) for length in lengths]


@every_index_run
@given(st.data(), st.sampled_from(("mean", "max")))
def test_against_float64(run: Run, data: st.DataObject, pooling: ChunkPooling) -> None:
    case = data.draw(run.cases())
    with run.chosen() as implementation:
        how: Implementation = "reference" if pooling == "max" else implementation
        expect(case, data.draw(edges_of(case.lengths)), pooling, how)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a block is of nothing, and where no row has chunks."""
    case = make_case(layout="paged", lengths=[100, 20, 9], kv_heads=2, group=1, head_dim=8, padding=3)
    edges = table([[4, 4, 9, 30, 31, 32, 32, 60, 99], [0, 20], []])
    options = {"longest": 39, "implementation": "reference"}
    whole = chunk_keys(case.kv, edges, **options)
    assert not whole[2].any()
    for block in (1, 20, 27, 300):
        monkeypatch.setattr(reference, "BLOCK", block)
        assert chunk_keys(case.kv, edges, **options).equal(whole)


@needs_the_library
@pytest.mark.parametrize(
    ("layout", "dtype", "count"),
    [("buffer", torch.float32, 1), ("paged", torch.bfloat16, 2), ("columns", torch.float32, 2)],
)
def test_implementations_give_the_same_bits(layout: str, dtype: torch.dtype, count: int) -> None:
    """More chunks than an item of the C implementation has, and as much cache as wakes a second thread."""
    lengths = [3000, 40, 7]
    case = make_case(layout=layout, lengths=lengths, group=1, head_dim=80, dtype=dtype, padding=3, page=20)
    edges = table([[0, 37, 37, 120, *range(300, 2990, 27), 3000], [3, 40], []])
    with threads(count):
        one, other = (chunk_keys(case.kv, edges, longest=500, implementation=name) for name in every_index)
    assert one.equal(other)


@every_implementation
def test_nan_infinity_and_zeros_of_a_chunk_stay_its_own(implementation: Implementation) -> None:
    case = make_case(layout="buffer", lengths=[16], kv_heads=1, group=1, head_dim=16)
    first = case.kv.rows.row_start[0]
    keys = case.kv.k[case.kv.rows.page_table[0, 0], first:, 0]
    keys[1, 3], keys[6, 5], keys[12:16] = torch.nan, torch.inf, 0.0
    options = {"longest": 4, "implementation": implementation}
    found = chunk_keys(case.kv, table([[0, 4, 8, 12, 16]]), **options)[0, 0]
    assert found.isnan().any(dim=1).tolist() == [True, True, False, False]
    assert found[2].norm() == pytest.approx(1) and not found[3].any()


@needs_the_library
def test_pages_that_are_not_there_are_not_read() -> None:
    for page, start, told in ((99, 0, "outside the storage"), (-1, 0, "outside the storage"), (0, 40, "its pages")):
        case = make_case(layout="paged", lengths=[20], kv_heads=1, group=1)
        case.kv.rows.page_table.fill_(page)
        case.kv.rows.row_start.fill_(start)
        edges = table([[0, 9, 20]])
        refused(f"chunk_keys: .*{told}", chunk_keys, case.kv, edges, longest=20, implementation="native")


@every_implementation
def test_what_lies_in_no_chunk_does_not_matter(implementation: Implementation) -> None:
    """NaN in the rows themselves, between and behind the chunks."""
    case = make_case(layout="buffer", lengths=[20, 9], kv_heads=2, group=1, head_dim=16)
    edges = table([[3, 7, 7, 12], []])
    options = {"longest": 8, "implementation": implementation}
    whole = chunk_keys(case.kv, edges, **options)
    assert api.chunk_keys((case.kv, case.kv), edges, **options).equal(torch.stack((whole, whole)))
    kept = case.kv.k[case.kv.rows.page_table[0, 0], 3:12].clone()
    case.kv.k.fill_(torch.nan)
    case.kv.k[case.kv.rows.page_table[0, 0], 3:12] = kept
    assert chunk_keys(case.kv, edges, **options).equal(whole)
    assert not whole[0, :, 1].any() and not whole[1].any()


def test_errors() -> None:
    case = make_case(layout="buffer", lengths=[9, 8], kv_heads=1, group=1, head_dim=4)
    for edges, chunk, told in (
        ([4, 9], 0, r"4\.\.9"),
        ([-1, 4], 0, r"-1\.\.4"),
        ([0, 4, 2], 1, r"4\.\.2"),
        ([0, 1, 1, 7, 7], 2, r"1\.\.7"),
    ):
        bounds = "edges must ascend from 0 or more to at most 8, by at most 5"
        words = rf"chunk_keys: chunk {chunk} of row 1 is {told}; {bounds}"
        refused(words, chunk_keys, case.kv, table([[0, 5], edges]), longest=5)
    good = table([[0, 4], []])
    for wrong, words in (
        (good[:1], r"edges must be \[2, 2 or more\] on cpu, got \[1, 2\] on cpu"),
        (good[:, :1], r"got \[2, 1\]"),
        (good.long(), r"edges must be int32, got torch\.int64"),
    ):
        refused(words, chunk_keys, case.kv, wrong, longest=4)
    refused("longest must be at least 1, got 0", chunk_keys, case.kv, good, longest=0)
    refused("unknown pooling 'sum'; use mean or max", chunk_keys, case.kv, good, longest=4, pooling="sum")
    strided = make_case(layout="strided", lengths=[8, 8], kv_heads=3, group=1, head_dim=8)
    words = "implementation 'native' cannot take this call"
    refused(words, chunk_keys, strided.kv, good, longest=4, implementation="native")


@pytest.mark.parametrize("layout", ["buffer", "paged", "strided"])
def test_keys_of_tokens_are_those_of_the_cache(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library and without; what lies behind the end is zero."""
    case = make_case(layout=layout, lengths=[40, 9], kv_heads=2, group=1, head_dim=16, padding=3)
    for _ in range(2):
        found = token_keys((case.kv, case.kv), torch.tensor([3, 0]), 12, torch.tensor([20, 7]))
        for row, (first, end) in enumerate(((3, 15), (0, 7))):
            for head in range(2):
                expected = np.zeros((12, 16))
                expected[: end - first] = case.keys[row][head][first:end]
                for layer in range(2):
                    assert found[layer, row, head].double().numpy().tolist() == expected.tolist()
        monkeypatch.setattr("saccade.kernels.chunk_keys.api.cache_refusal", lambda *_: "none here")
