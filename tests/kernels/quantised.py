"""Caches of 8-bit floats for the kernel tests, and what they stand for; both sides of the checks of every operation.

The oracle reads `number · scale` in float64, which is exact: 4 bits times 24. Kernels multiply by a scale once in
float32, wherever they do, and that rounding fits the budgets of `kernel_budgets`: theirs of q·k and of a page's bound
have `group` + 1 units more than a sum of so many products needs, of which a mean query takes `group`; the sum of the
values has twice the units of its terms, of which it takes their number.
"""

from dataclasses import replace

import numpy as np
import torch
from attention_contract import expect_everything, flags
from hypothesis import given
from hypothesis import strategies as st
from kernel_budgets import largest_query, score_error
from kernel_caches import Case, cases, make_case
from kernel_checks import INTERPRETED, fewer, groupings, poolings
from page_bounds_contract import bounds_of, expect_page_scores, expect_update, filled
from torch import Tensor

import oracles
from saccade.kernels._dispatch import Implementation
from saccade.types import Pooling

FP8 = torch.float8_e4m3fn
DTYPES = (FP8, torch.float8_e5m2)
scales = st.sampled_from((0.013, 0.3, 1.0, 3.7))
query_dtypes = st.sampled_from((torch.float32, torch.float16))
IMPLEMENTATION: Implementation = "triton" if INTERPRETED else "auto"
"""On a CPU the reference alone takes such a cache."""


def quantised(case: Case, k_scale: Tensor, v_scale: Tensor, query: torch.dtype, dtype: torch.dtype = FP8) -> Case:
    """The same layout in 8 bits, NaN where it was; scales are `[Hkv]`, keys and values what the numbers stand for."""
    kv_heads = case.kv.kv_heads

    def meant(heads: list[list[np.ndarray]], scale: Tensor) -> list[list[np.ndarray]]:
        factors = scale.double().expand(kv_heads).tolist()
        return [
            [
                (torch.tensor(vectors).to(dtype).double() * factor).numpy()
                for vectors, factor in zip(row, factors, strict=True)
            ]
            for row in heads
        ]

    held = replace(case.kv, k=in_place(case.kv.k, dtype), v=in_place(case.kv.v, dtype))
    return replace(
        case,
        kv=replace(held, k_scale=k_scale, v_scale=v_scale),
        q=case.q.to(query),
        keys=meant(case.keys, k_scale),
        values=meant(case.values, v_scale),
    )


def in_place(storage: Tensor, dtype: torch.dtype) -> Tensor:
    """Other numbers with the strides of these, and all memory between them."""
    size = storage.untyped_storage().nbytes() // storage.element_size()
    flat = storage.as_strided((size,), (1,), 0).to(dtype)
    return flat.as_strided(storage.shape, storage.stride(), storage.storage_offset())


@st.composite
def quantised_cases(draw: st.DrawFn) -> Case:
    """A factor of the whole layer, as vLLM has it, or of each head."""
    head_dims = (8, 16, 24) if INTERPRETED else (1, 8, 24, 64)
    case = draw(cases(longest=70 if INTERPRETED else 40, dtypes=(torch.float32,), head_dims=head_dims))
    heads = case.kv.kv_heads
    factors = st.one_of(scales, st.lists(scales, min_size=heads, max_size=heads)).map(
        lambda one: torch.tensor(one).expand(heads)
    )
    return quantised(case, draw(factors), draw(factors), draw(query_dtypes), draw(st.sampled_from(DTYPES)))


def small() -> Case:
    case = make_case(lengths=[33, 9])
    return quantised(case, torch.tensor([0.5, 3.7]), torch.tensor([0.3, 1.0]), torch.float32)


def expect_bound_scores(case: Case, page: int, pooling: Pooling, implementation: Implementation) -> None:
    """What the oracle says, and never below the score of a token in the page."""
    bounds = filled(bounds_of(case, page), case, page)
    scores = bounds.scores(case, page, implementation, pooling=pooling, k_scale=case.kv.k_scale)
    expect_page_scores(scores, case, page, bounds.lower.shape[2], pooling)
    group = case.q.shape[1] // case.kv.kv_heads
    for row in range(len(case.lengths)):
        queries, keys = case.queries[row], case.keys[row]
        for index, each in enumerate(oracles.raw_scores(queries, keys, pooling)):
            head = index // group if pooling == "each" else index
            largest = largest_query(queries[head * group : (head + 1) * group])
            for position, score in enumerate(each):
                # The page's largest components, both sides of it: what its own budget is made of.
                own = keys[head][position // page * page : (position // page + 1) * page]
                error = score_error(largest * 2, np.tile(np.abs(own).max(0), 2), group)
                assert scores[row, index, position // page].item() >= score - error


@fewer(12)
@given(quantised_cases(), groupings, st.sampled_from((1, 4, 16)), poolings, st.data())
def test_attention_matches_the_oracle(case: Case, sets: str, unit: int, pooling: Pooling, data: st.DataObject) -> None:
    expect_everything(case, IMPLEMENTATION, sets, unit, pooling, data.draw(flags(case)))


@fewer(12)
@given(quantised_cases(), st.sampled_from((1, 3, 16)), st.data())
def test_bounds_are_numbers_of_the_cache(case: Case, page: int, data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, case.kv.rows.max_len + page)) for _ in case.lengths]
    count = data.draw(st.integers(0, case.kv.rows.max_len))
    expect_update(case, bounds_of(case, page), page, starts, count, IMPLEMENTATION)


@fewer(12)
@given(quantised_cases(), st.sampled_from((1, 3, 16)), poolings)
def test_a_pages_score_bounds_those_of_its_tokens(case: Case, page: int, pooling: Pooling) -> None:
    expect_bound_scores(case, page, pooling, IMPLEMENTATION)
