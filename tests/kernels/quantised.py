"""Caches of 8-bit floats for the kernel tests, and what they stand for; both sides of the checks of every operation.

The oracle reads `number · scale` in float64, which is exact: 4 bits times 24. Kernels multiply by a scale once in
float32, wherever they do, and that rounding fits the budgets of `kernel_budgets`: theirs of q·k and of a page's bound
have `group` + 1 units more than a sum of so many products needs, of which a mean query takes `group`; the sum of the
values has twice the units of its terms, of which it takes their number.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from kernel_budgets import largest_query, score_error
from kernel_caches import Case, cases, int32
from kernel_checks import expect_dense, expect_scores
from test_hybrid_decode import check
from test_page_bounds import expect_page_scores, fresh, poisoned, scores_of
from test_sparse_decode import expect_sparse
from torch import Tensor

import oracles
from saccade.kernels._dispatch import Implementation
from saccade.kernels.dense_decode_scores.api import decode_scores
from saccade.kernels.page_bounds.api import update_page_bounds
from saccade.types import Pooling

FP8 = torch.float8_e4m3fn
scales = st.sampled_from((0.013, 0.3, 1.0, 3.7))
query_dtypes = st.sampled_from((torch.float32, torch.float16))


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
def quantised_cases(draw: st.DrawFn, *, longest: int = 40, head_dims: tuple[int, ...] = (1, 8, 24, 64)) -> Case:
    """A factor of the whole layer, as vLLM has it, or of each head."""
    case = draw(cases(longest=longest, dtypes=(torch.float32,), head_dims=head_dims))
    heads = case.kv.kv_heads
    count = draw(st.sampled_from((1, heads)))
    k_scale, v_scale = (
        torch.tensor([draw(scales) for _ in range(count)]).expand(heads) if count > 1 else torch.tensor(draw(scales))
        for _ in range(2)
    )
    return quantised(case, k_scale.expand(heads), v_scale.expand(heads), draw(query_dtypes))


def expect_everything(
    case: Case, implementation: Implementation, sets: str, unit: int, pooling: Pooling, dense: tuple[bool, ...]
) -> None:
    """Attention to all tokens, to sets and to both, with the scores on the way, and the scores alone."""
    expect_dense(case, pooling, implementation)
    expect_scores(decode_scores(case.q, case.kv, pooling=pooling, implementation=implementation), case, pooling)
    expect_sparse(case, sets, unit, 3, 0, implementation)
    check(case, implementation, sets, unit, dense, pooling, None, 1)


def expect_bounds(case: Case, page: int, starts: list[int], count: int, implementation: Implementation) -> None:
    """In 8 bits, times the scale, they are the smallest and largest numbers themselves; other pages hold NaN still."""
    lower, upper = poisoned(case, page)
    changed = int32(starts, lower.device)
    update_page_bounds(lower, upper, case.kv, page=page, start=changed, count=count, implementation=implementation)
    scale = _scale(case)
    below, above = (bounds.double() * scale.double()[:, None, None] for bounds in (lower, upper))
    for row, (start, length) in enumerate(zip(starts, case.lengths, strict=True)):
        touched = {position // page for position in range(start, min(start + count, length))}
        for head, keys in enumerate(case.keys[row]):
            expected = oracles.page_bounds(keys, page)
            for number in range(lower.shape[2]):
                sides = below[row, head, number], above[row, head, number]
                if number not in touched:
                    assert all(bool(side.isnan().all()) for side in sides)
                    continue
                assert tuple(side.tolist() for side in sides) == expected[number]
                own = torch.tensor(keys[number * page : (number + 1) * page], dtype=torch.float64).to(lower.device)
                assert bool((own >= sides[0]).all())
                assert bool((own <= sides[1]).all())


def expect_bound_scores(case: Case, page: int, pooling: Pooling, implementation: Implementation) -> None:
    """What the oracle says, and never below the score of a token in the page."""
    bounds = fresh(case, page, implementation)
    scores = scores_of(case, bounds, page, implementation, pooling=pooling, k_scale=case.kv.k_scale)
    expect_page_scores(scores, case, page, bounds[0].shape[2], pooling)
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


def _scale(case: Case) -> Tensor:
    assert case.kv.k_scale is not None
    return case.kv.k_scale
