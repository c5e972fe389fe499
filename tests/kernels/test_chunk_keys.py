"""Chunk keys and bounds: of a row's own slots alone, in every layout, against naive float64 means and extremes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_budgets import gamma
from kernel_caches import Case, cases, make_case
from kernel_checks import implementations, takes

from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels.chunk_keys import api
from saccade.kernels.chunk_keys.api import ChunkPooling, chunk_bounds, chunk_keys

poolings = st.sampled_from(("mean", "max"))


def expect(case: Case, row: int, edges: list[int], pooling: ChunkPooling, implementation: Implementation) -> None:
    """A mean of n numbers errs by gamma(n + 1) of their magnitude, the length by gamma(d + 2), the quotient by 1 more.

    So a component of the unit vector errs by that share of the mean magnitudes over the pooled vector's length; and
    the length itself by the same of all components.
    """
    keys = chunk_keys(case.kv, row, edges, pooling=pooling, implementation=implementation)
    assert keys.dtype == torch.float32
    assert keys.shape == (case.kv.kv_heads, len(edges) - 1, case.kv.head_dim)
    for head, tokens in enumerate(case.keys[row]):
        for number, (start, stop) in enumerate(pairwise(edges)):
            columns = list(zip(*tokens[start:stop], strict=True))
            pooled = [max(c) if pooling == "max" else math.fsum(c) / (stop - start) for c in columns]
            sizes = [
                math.fsum(abs(x) for x in c) / (stop - start) if pooling == "mean" else abs(max(c)) for c in columns
            ]
            length = math.sqrt(math.fsum(x * x for x in pooled))
            got = keys[head, number].tolist()
            if length == 0:
                assert got == pooled
                continue
            relative = gamma(stop - start + case.kv.head_dim + 5)
            largest = math.sqrt(math.fsum(x * x for x in sizes)) / length
            for have, want, size in zip(got, pooled, sizes, strict=True):
                assert abs(have - want / length) <= relative * (size / length + abs(want) / length * largest) + 1e-30


def expect_bounds(case: Case, row: int, edges: list[int], implementation: Implementation) -> None:
    """Bounds are numbers of the cache, so there is no error."""
    lower, upper = chunk_bounds(case.kv, row, edges, implementation=implementation)
    assert lower.dtype == upper.dtype == torch.float32
    for head, tokens in enumerate(case.keys[row]):
        columns = [list(zip(*tokens[start:stop], strict=True)) for start, stop in pairwise(edges)]
        assert lower[head].tolist() == [[min(c) for c in chunk] for chunk in columns]
        assert upper[head].tolist() == [[max(c) for c in chunk] for chunk in columns]


@given(cases(longest=60), st.data(), poolings, implementations)
def test_against_float64(
    case: Case, data: st.DataObject, pooling: ChunkPooling, implementation: Implementation
) -> None:
    assume(takes(implementation, case))
    for row, length in enumerate(case.lengths):
        edges = sorted(data.draw(st.sets(st.integers(0, length), min_size=2, max_size=8)))
        expect(case, row, edges, pooling, implementation)
        expect_bounds(case, row, edges, implementation)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, implementation: Implementation) -> None:
    case = make_case(layout="paged", lengths=[100], kv_heads=2, group=1, head_dim=8, padding=3)
    edges = [4, 9, 30, 31, 32, 60, 99]
    whole = chunk_keys(case.kv, 0, edges, implementation=implementation)
    bounds = chunk_bounds(case.kv, 0, edges, implementation=implementation)
    for block in (1, 20, 27):
        monkeypatch.setattr(api, "_BLOCK", block)
        assert chunk_keys(case.kv, 0, edges, implementation=implementation).equal(whole)
        in_blocks = chunk_bounds(case.kv, 0, edges, implementation=implementation)
        assert all(part.equal(other) for part, other in zip(in_blocks, bounds, strict=True))


def test_zero_keys_stay_zero() -> None:
    case = make_case(layout="buffer", lengths=[8], kv_heads=1, group=1, head_dim=4)
    case.kv.k.zero_()
    assert chunk_keys(case.kv, 0, [0, 4, 8]).equal(torch.zeros(1, 2, 4))


def test_errors() -> None:
    case = make_case(layout="buffer", lengths=[8], kv_heads=1, group=1, head_dim=4)
    for edges in ([0], [], [0, 9], [-1, 4], [0, 4, 4], [4, 2]):
        for operation in (chunk_keys, chunk_bounds):
            with pytest.raises(
                KernelError, match=f"{operation.__name__}: edges must ascend from 0 or more to at most 8"
            ):
                operation(case.kv, 0, edges)
    with pytest.raises(KernelError, match="unknown pooling 'sum'; use mean or max"):
        chunk_keys(case.kv, 0, [0, 4], pooling="sum")
    strided = make_case(layout="strided", lengths=[8], kv_heads=3, group=1, head_dim=8)
    with pytest.raises(KernelError, match="implementation 'cpu' cannot take this call"):
        chunk_keys(strided.kv, 0, [0, 4], implementation="cpu")
