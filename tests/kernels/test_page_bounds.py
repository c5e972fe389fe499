"""Page bounds: recomputed from the cache, aligned to each row's first token, and never below a true score."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_budgets import largest_query, score_error
from kernel_caches import Case, cases, int32, make_case
from kernel_checks import every_index, fast_index, index_implementations, poolings, takes, threads
from torch import Tensor

import oracles
from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels._native import library as native
from saccade.kernels.page_bounds.api import page_scores, update_page_bounds
from saccade.types import Pooling

pages = st.sampled_from((1, 3, 16))


def poisoned(case: Case, page: int, spare: int = 2) -> tuple[Tensor, Tensor]:
    count = -(-case.kv.rows.max_len // page) + spare
    shape = (2, len(case.lengths), case.kv.kv_heads, count, case.kv.head_dim)
    lower, upper = torch.full(shape, torch.nan, device=case.kv.k.device).to(case.kv.k.dtype)
    return lower, upper


def expect_update(
    case: Case, page: int, starts: list[int], count: int, implementation: Implementation, filled: bool = False
) -> None:
    """Update fresh bounds: touched pages are right, the others hold what they held."""
    lower, upper = poisoned(case, page)
    changed = int32(starts, lower.device)
    update_page_bounds(
        lower, upper, case.kv, page=page, start=changed, count=count, filled=filled, implementation=implementation
    )
    for row, (start, length) in enumerate(zip(starts, case.lengths, strict=True)):
        stop = min(start + count, length // page * page if filled else length)
        touched = {position // page for position in range(start, stop)}
        for head, keys in enumerate(case.keys[row]):
            expected = oracles.page_bounds(keys, page)
            for number in range(lower.shape[2]):
                got = (lower[row, head, number].tolist(), upper[row, head, number].tolist())
                if number in touched:
                    assert got == expected[number]
                else:
                    assert all(math.isnan(component) for side in got for component in side)


@given(cases(), index_implementations, pages, st.data())
def test_only_touched_pages_are_recomputed(
    case: Case, implementation: Implementation, page: int, data: st.DataObject
) -> None:
    assume(takes(implementation, case))
    starts = [data.draw(st.integers(0, case.kv.rows.max_len + page)) for _ in case.lengths]
    count = data.draw(st.integers(0, case.kv.rows.max_len))
    expect_update(case, page, starts, count, implementation, data.draw(st.booleans()))


@pytest.mark.parametrize("implementation", every_index)
@pytest.mark.parametrize("page", [1, 2, 3, 4])
def test_every_start_and_count(page: int, implementation: Implementation) -> None:
    case = make_case(layout="paged", lengths=[9, 7], kv_heads=1, group=1, head_dim=16, padding=1)
    for start in range(11):
        for count in range(11):
            for filled in (False, True):
                expect_update(case, page, [start, max(start - 2, 0)], count, implementation, filled)


def fresh(case: Case, page: int, implementation: Implementation = "auto") -> tuple[Tensor, Tensor]:
    """The bounds of all tokens, NaN in the pages beyond them."""
    lower, upper = poisoned(case, page)
    start, longest = torch.zeros_like(case.kv.rows.seq_lens), case.kv.rows.max_len
    update_page_bounds(lower, upper, case.kv, page=page, start=start, count=longest, implementation=implementation)
    return lower, upper


def scores_of(
    case: Case, bounds: tuple[Tensor, Tensor], page: int, implementation: Implementation = "auto", **others: Any
) -> Tensor:
    """What `page_scores` says of the case; `max` of a group unless another pooling is asked for."""
    others = {"pooling": "max", "implementation": implementation, **others}
    return page_scores(case.q, *bounds, case.kv.rows.seq_lens, page=page, **others)


def expect_page_scores(scores: Tensor, case: Case, page: int, pages: int, pooling: Pooling) -> None:
    group = case.q.shape[1] // case.kv.kv_heads
    heads = case.q.shape[1] if pooling == "each" else case.kv.kv_heads
    assert scores.dtype == torch.float32
    assert scores.shape == (len(case.lengths), heads, pages)
    for row in range(len(case.lengths)):
        queries, keys = case.queries[row], case.keys[row]
        for index, expected in enumerate(oracles.page_scores(queries, keys, page, pooling)):
            head = index // group if pooling == "each" else index
            largest = largest_query(queries[head * group : (head + 1) * group])
            # Two products over the same components: each component counts at its larger bound, twice.
            extreme = np.abs(oracles.page_bounds(keys[head], page)).max(1)[:pages]
            errors = score_error(largest * 2, np.tile(extreme, 2), group)
            got = scores[row, index, : len(errors)].double().cpu().numpy()
            assert (np.abs(got - expected[: len(errors)]) <= errors).all()


@given(cases(), index_implementations, pages, poolings)
def test_page_scores_match_the_oracle(case: Case, implementation: Implementation, page: int, pooling: Pooling) -> None:
    assume(implementation != "native" or (case.kv.k.dtype != torch.float16 and case.kv.head_dim % 16 == 0))
    lower, upper = fresh(case, page)
    scores = scores_of(case, (lower, upper), page, implementation, pooling=pooling)
    expect_page_scores(scores, case, page, lower.shape[2], pooling)


if "native" in fast_index:

    @pytest.mark.parametrize("lanes", [4, 8, 16, 32])
    @given(
        case=cases(dtypes=(torch.float32, torch.bfloat16), head_dims=(16, 48, 64, 96, 128)),
        page=pages,
        pooling=poolings,
    )
    def test_page_scores_of_every_width(lanes: int, case: Case, page: int, pooling: Pooling) -> None:
        """Read where an index keeps them: among more heads and pages than are asked for, the two sides apart."""
        lower, upper = fresh(case, page)
        wide = torch.nn.functional.pad(upper, (0, 8, 0, 3, 1, 0), value=torch.nan)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "widest", lanes)
            sides = lower[:, :, :-1], wide[:, 1:, : lower.shape[2] - 1, :-8]
            scores = scores_of(case, sides, page, "native", pooling=pooling)
        expect_page_scores(scores, case, page, lower.shape[2] - 1, pooling)


@pytest.mark.parametrize("implementation", fast_index)
@pytest.mark.parametrize("pooling", ["max", "mean", "each"])
def test_pages_of_several_spans(pooling: Pooling, implementation: Implementation) -> None:
    """Enough bytes that two threads share them, and a row that needs fewer pages than the other."""
    case = make_case(layout="buffer", lengths=[1100, 500], kv_heads=2, group=3, head_dim=96)
    lower, upper = fresh(case, 1)
    with threads(2):
        scores = scores_of(case, (lower, upper), 1, implementation, pooling=pooling)
    expect_page_scores(scores, case, 1, lower.shape[2], pooling)
    alone = scores_of(case, (lower, upper), 1, implementation, pooling=pooling)
    if implementation == "native":
        assert torch.equal(scores, alone)  # a page's sum does not depend on who adds it up


@pytest.mark.parametrize("implementation", fast_index)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_that_are_no_bfloat16_numbers_lose_nothing(head_dim: int, implementation: Implementation) -> None:
    """More pages than are looked at together, and one query among others that are such numbers."""
    case = make_case(layout="buffer", lengths=[301], kv_heads=1, group=5, head_dim=head_dim, dtype=torch.bfloat16)
    lower, upper = fresh(case, 1)
    for finer in (0.0, 2.0**-11):
        queries = case.q.float()
        queries[0, 3] *= 1 + finer
        asked = replace(case, q=queries)
        scores = scores_of(asked, (lower, upper), 1, implementation, pooling="each")
        expect_page_scores(scores, asked, 1, lower.shape[2], "each")


@pytest.mark.parametrize("implementation", every_index)
def test_a_row_may_have_no_page(implementation: Implementation) -> None:
    """Nothing of its bounds is read; the other rows are scored as they are alone."""
    case = make_case(layout="buffer", lengths=[20, 9], kv_heads=2, group=2, head_dim=16)
    lower, upper = poisoned(case, 1)
    lower[1], upper[1] = -1.0, 2.0
    scores = page_scores(case.q, lower, upper, int32([0, 9]), page=1, pooling="max", implementation=implementation)
    assert scores[1, :, :9].isfinite().all()


@pytest.mark.parametrize("group", [7, 32])
def test_large_groups_are_bounded_in_parts(group: int) -> None:
    case = make_case(layout="buffer", lengths=[70, 9], kv_heads=1, group=group, head_dim=64, dtype=torch.bfloat16)
    lower, upper = fresh(case, 16)
    for pooling in get_args(Pooling):
        scores = page_scores(case.q, lower, upper, case.kv.rows.seq_lens, page=16, pooling=pooling)
        expect_page_scores(scores, case, 16, lower.shape[2], pooling)


@pytest.mark.parametrize("implementation", every_index)
def test_a_query_that_is_no_number_does_not_pass_for_one(implementation: Implementation) -> None:
    case = make_case(layout="buffer", lengths=[9], kv_heads=2, group=1, head_dim=16)
    lower, upper = fresh(case, 4)
    case.q[0, 0, 3] = torch.nan
    scores = scores_of(case, (lower, upper), 4, implementation, pooling="each")
    assert scores[0, 0, :3].isnan().all()
    assert scores[0, 1, :3].isfinite().all()


@pytest.mark.skipif("native" not in fast_index, reason="no library was built")
def test_bounds_that_the_library_cannot_take_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    good = make_case(layout="buffer", lengths=[40], kv_heads=1, group=2, head_dim=16)
    lower, upper = fresh(good, 16)
    many = torch.cat([good.q] * 17, dim=1)
    lengths = good.kv.rows.seq_lens
    wrong = [
        (good.q, lower.half(), upper.half(), "float16"),
        (good.q, lower, upper.bfloat16(), "bfloat16"),
        (good.q[..., :8], lower[..., :8], upper[..., :8], "head dim 8"),
        (good.q, lower.transpose(2, 3).contiguous().transpose(2, 3), upper, "strides"),
        (many, lower, upper, "34 query heads"),
    ]
    for q, low, high, words in wrong:
        with pytest.raises(KernelError, match=words):
            page_scores(q, low, high, lengths, page=16, pooling="max", implementation="native")
        wanted = page_scores(q, low, high, lengths, page=16, pooling="max", implementation="reference")
        scores = page_scores(q, low, high, lengths, page=16, pooling="max")
        torch.testing.assert_close(scores[..., :3], wanted[..., :3])
    with pytest.raises(KernelError, match="unknown implementation"):
        page_scores(good.q, lower, upper, lengths, page=16, pooling="max", implementation="fast")  # type: ignore[arg-type]
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(KernelError, match="no library"):
        page_scores(good.q, lower, upper, lengths, page=16, pooling="max", implementation="native")


@pytest.mark.parametrize("implementation", every_index)
def test_rewritten_keys_leave_no_trace(implementation: Implementation) -> None:
    """Rectification shrinks a bound: a running minimum and maximum would keep the old one."""
    case = make_case(layout="buffer", lengths=[40], kv_heads=1, group=1, head_dim=16)
    lower, upper = poisoned(case, 16)
    update_page_bounds(lower, upper, case.kv, page=16, start=int32([0]), count=40, implementation=implementation)
    before = upper.clone()
    case.kv.k[0, 20:22] = 100.0
    update_page_bounds(lower, upper, case.kv, page=16, start=int32([20]), count=2, implementation=implementation)
    assert upper[0, 0, 1].tolist() == [100.0] * 16
    case.kv.k[0, 20:22] = torch.tensor(case.keys[0][0][20:22])[:, None]
    update_page_bounds(lower, upper, case.kv, page=16, start=int32([20]), count=2, implementation=implementation)
    assert torch.equal(upper[:, :, :3], before[:, :, :3])


def test_many_pages_at_once() -> None:
    """In both caches alike, of rows that begin anywhere."""
    case = make_case(layout="paged", lengths=[2051, 1030], kv_heads=2, group=1, head_dim=2, padding=7)
    lower, upper = poisoned(case, 1)
    update_page_bounds(lower, upper, case.kv, page=1, start=int32([0, 3]), count=2051, implementation="reference")
    assert lower[0, :, :2051].tolist() == np.array(case.keys[0]).tolist()
    assert upper[1, :, 3:1030].tolist() == np.array(case.keys[1])[:, 3:].tolist()
    assert lower[1, :, 1030:].isnan().all()


def test_arguments_that_do_not_fit_are_named() -> None:
    case = make_case(layout="buffer", lengths=[40], kv_heads=1, group=2, head_dim=4)
    lower, upper = poisoned(case, 16)
    start = int32([0])
    with pytest.raises(KernelError, match="cannot hold"):
        update_page_bounds(lower[:, :, :2], upper[:, :, :2], case.kv, page=16, start=start, count=1)
    with pytest.raises(KernelError, match="float32"):
        update_page_bounds(lower.half(), upper.half(), case.kv, page=16, start=start, count=1)
    with pytest.raises(KernelError, match="bounds must be"):
        update_page_bounds(lower[0], upper[0], case.kv, page=16, start=start, count=1)
    with pytest.raises(KernelError, match="match"):
        page_scores(case.q[..., :2], lower, upper, case.kv.rows.seq_lens, page=16, pooling="max")
