"""Triton's dense pass in the interpreter against float64 loops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_caches import Case, cases, make_case
from test_dense_pass import counts, expect_pass, queries_of

from saccade.kernels._triton import plan
from saccade.kernels.dense_pass import triton
from saccade.kernels.dense_pass.api import dense_pass
from saccade.kernels.dense_pass.triton import Tuning
from walking import drawn

few = drawn(12)


@pytest.fixture(autouse=True, scope="module")
def _several_parts() -> Iterator[None]:
    """A machine so large that short rows are cut into many parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "processors", lambda _: 24)
        yield


@few
@given(
    cases(longest=70, dtypes=(torch.float32, torch.float16), head_dims=(8, 16, 24)),
    counts,
    st.sampled_from((16, 32, 64)),
    st.integers(0, 2**31),
)
def test_dense_pass_matches_the_oracle(case: Case, count: int, tile: int, seed: int) -> None:
    q = queries_of(case, count, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "tuning", lambda *_: Tuning(tile, block=16, warps=4, stages=2, resident=8))
        expect_pass(dense_pass(q, case.kv, case.softmax, implementation="triton"), case, q)


def test_a_loose_bound_and_the_sizes_it_chooses_itself() -> None:
    case = make_case(
        layout="paged", lengths=[150, 40], kv_heads=2, group=4, head_dim=16, dtype=torch.float16, loose=500
    )
    q = queries_of(case, 33, 0)
    expect_pass(dense_pass(q, case.kv, case.softmax, implementation="triton"), case, q)
