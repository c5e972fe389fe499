"""Triton's dense pass in the interpreter against float64 loops."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_caches import Case, make_case
from kernel_checks import Run, fewer, seeds
from test_dense_pass import counts, expect_pass, queries_of

from saccade.kernels._triton import plan
from saccade.kernels.dense_pass import triton


@pytest.fixture(autouse=True, scope="module")
def _several_parts() -> Iterator[None]:
    """A machine so large that short rows are cut into many parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "processors", lambda _: 24)
        yield


@fewer(12)
@given(Run("triton").cases(), counts, st.sampled_from((16, 32, 64)), seeds)
def test_dense_pass_matches_the_oracle(case: Case, count: int, tile: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "tuning", lambda *_: (tile, plan.Tuning(block=16, warps=4, stages=2, resident=8)))
        expect_pass(case, queries_of(case, count, seed), "triton")


def test_a_loose_bound_and_the_sizes_it_chooses_itself() -> None:
    case = make_case(layout="paged", lengths=[150, 40], group=4, dtype=torch.float16, loose=500)
    expect_pass(case, queries_of(case, 33, 0), "triton")
