"""Caches of 8-bit floats in Triton's interpreter, against the same float64 loops as the reference."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kernel_caches import Case
from kernel_checks import poolings
from quantised import expect_bound_scores, expect_bounds, expect_everything, quantised_cases
from test_hybrid_decode import flags
from test_triton_attention import _several_parts  # noqa: F401 - in every test of this file

from saccade.types import Pooling
from walking import drawn

few = drawn(12)
heads = (8, 16, 24)


@few
@given(
    quantised_cases(longest=70, head_dims=heads),
    st.sampled_from(("all", "kv", "query")),
    st.sampled_from((1, 4, 16)),
    poolings,
    st.data(),
)
def test_attention_matches_the_oracle(case: Case, sets: str, unit: int, pooling: Pooling, data: st.DataObject) -> None:
    expect_everything(case, "triton", sets, unit, pooling, data.draw(flags(case)))


@few
@given(quantised_cases(head_dims=heads), st.sampled_from((1, 3, 16)), st.data())
def test_bounds_are_numbers_of_the_cache(case: Case, page: int, data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, case.kv.rows.max_len + page)) for _ in case.lengths]
    expect_bounds(case, page, starts, data.draw(st.integers(0, case.kv.rows.max_len)), "triton")


@few
@given(quantised_cases(head_dims=heads), st.sampled_from((1, 3, 16)), poolings)
def test_a_pages_score_bounds_those_of_its_tokens(case: Case, page: int, pooling: Pooling) -> None:
    expect_bound_scores(case, page, pooling, "triton")
