"""Caches of 8-bit floats: the reference against float64 loops, and every faster form on CPUs refuses by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_caches import Case, int32, make_case
from kernel_checks import fast_attention, poolings
from quantised import FP8, expect_bound_scores, expect_bounds, expect_everything, quantised, quantised_cases
from test_hybrid_decode import flags
from test_sparse_decode import choose

from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.hybrid_decode.api import hybrid_decode
from saccade.kernels.page_bounds.api import page_scores, update_page_bounds
from saccade.kernels.sparse_decode.api import sparse_decode


@given(quantised_cases(), st.sampled_from(("all", "kv", "query")), st.sampled_from((1, 4, 16)), poolings, st.data())
def test_attention_matches_the_oracle(case: Case, sets: str, unit: int, pooling: str, data: st.DataObject) -> None:
    expect_everything(case, "reference", sets, unit, pooling, data.draw(flags(case)))  # type: ignore[arg-type]


@given(quantised_cases(), st.sampled_from((1, 3, 16)), st.data())
def test_bounds_are_numbers_of_the_cache(case: Case, page: int, data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, case.kv.rows.max_len + page)) for _ in case.lengths]
    expect_bounds(case, page, starts, data.draw(st.integers(0, case.kv.rows.max_len)), "reference")


@given(quantised_cases(), st.sampled_from((1, 3, 16)), poolings)
def test_a_pages_score_bounds_those_of_its_tokens(case: Case, page: int, pooling: str) -> None:
    expect_bound_scores(case, page, pooling, "reference")  # type: ignore[arg-type]


def small() -> Case:
    case = make_case(layout="buffer", lengths=[33, 9], kv_heads=2, group=2, head_dim=16, dtype=torch.float32)
    return quantised(case, torch.tensor([0.5, 3.7]), torch.tensor([0.3, 1.0]), torch.float32)


def calls(case: Case) -> dict[str, Callable[[Implementation], object]]:
    """Every operation that reads the cache or what is kept of it, and has faster forms for CPUs."""
    selection, _ = choose(case, "kv", 1, 0, 0)
    lower, upper = (torch.zeros(2, 2, 9, 16).to(FP8) for _ in range(2))
    lengths, start = case.kv.rows.seq_lens, int32([0, 0])

    def attend(how: Implementation) -> object:
        return dense_decode_scores(case.q, case.kv, case.softmax, pooling="max", implementation=how)

    def select(how: Implementation) -> object:
        return sparse_decode(case.q, case.kv, selection, case.softmax, implementation=how)

    def both(how: Implementation) -> object:
        return hybrid_decode(case.q, case.kv, selection, (True, False), case.softmax, implementation=how)

    def score(how: Implementation) -> object:
        return decode_scores(case.q, case.kv, pooling="max", implementation=how)

    def update(how: Implementation) -> object:
        update_page_bounds(lower, upper, case.kv, page=4, start=start, count=33, implementation=how)
        return lower.float(), upper.float()

    def bound(how: Implementation) -> object:
        scale = case.kv.k_scale
        return page_scores(
            case.q, lower, upper, lengths, page=4, pooling="max", k_scale=scale, implementation=how
        ).masked_fill(torch.arange(9) * 4 >= lengths[:, None, None], 0)

    return {"attend": attend, "select": select, "both": both, "score": score, "update": update, "bound": bound}


@pytest.mark.parametrize(
    ("operation", "implementation"),
    # Bounds have no form for torch on a CPU alone.
    [
        (name, how)
        for name in calls(small())
        for how in fast_attention
        if how != "cpu" or name not in ("update", "bound")
    ],
)
def test_faster_forms_refuse_and_never_fall_back(operation: str, implementation: Implementation) -> None:
    with pytest.raises(KernelError, match=f"'{implementation}' cannot take this call: .*(quantised|float8_e4m3fn)"):
        calls(small())[operation](implementation)


@pytest.mark.parametrize("operation", calls(small()))
def test_what_nobody_chose_is_the_reference(operation: str) -> None:
    auto, plain = (calls(small())[operation](how) for how in ("auto", "reference"))
    for one, other in zip(*(part if isinstance(part, tuple) else (part,) for part in (auto, plain)), strict=True):
        assert one is other is None or (torch.is_tensor(one) and torch.equal(one, other))


def test_a_number_that_is_none_shows_where_it_is_read_and_nowhere_else() -> None:
    """8 bits have a NaN: within a row it reaches that row's head, behind a row nothing reads it."""
    case = small()
    case.kv.k[case.kv.rows.page_table[1, 0], 4 + int(case.kv.rows.row_start[1]), 0, 3] = torch.nan
    out, _ = dense_decode_scores(case.q, case.kv, case.softmax, implementation="reference")
    assert out.isnan().any(dim=-1).tolist() == [[False] * 4, [True, True, False, False]]
