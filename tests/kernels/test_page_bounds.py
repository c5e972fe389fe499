"""Page bounds on CPUs: what is kept where keys are rewritten, many pages, threads, and what does not fit."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from kernel_caches import int32, make_case
from kernel_checks import every_implementation, every_index, fast_index, needs_the_library, refused, threads
from page_bounds_contract import *  # noqa: F403 - its tests, of these implementations
from page_bounds_contract import Bounds, bounds_of, expect_page_scores, expect_update, filled
from quantised import (
    small,
    test_a_pages_score_bounds_those_of_its_tokens,  # noqa: F401
    test_bounds_are_numbers_of_the_cache,  # noqa: F401
)

from saccade.kernels._dispatch import Implementation
from saccade.kernels._native import library as native
from saccade.kernels.page_bounds.api import page_scores
from saccade.selection.scorers.page_bounds import PageBounds, PageBoundScorer
from saccade.types import Pooling


@needs_the_library
@pytest.mark.parametrize(("lanes", "dtype"), [(4, torch.bfloat16), (8, torch.float32), (16, torch.bfloat16)])
def test_many_pages(lanes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are looked up at a time; read where an index keeps them, among more heads and pages than are asked for.

    Two threads share them, and a page's sum does not depend on who adds it up.
    """
    monkeypatch.setattr(native, "widest", lanes)
    case = make_case(lengths=[300, 160], kv_heads=2, group=3, head_dim=96, dtype=dtype)
    apart = filled(bounds_of(case, 1), case, 1)
    wide = torch.nn.functional.pad(apart.upper, (0, 8, 0, 3, 1, 0), value=torch.nan)
    for bounds, page, count in (
        (Bounds(apart.lower[:, :, :-1], wide[:, 1:, : apart.lower.shape[2] - 1, :-8]), 1, 301),
        (filled(bounds_of(case, 2, 3), case, 2), 2, 150),
    ):
        for pooling in get_args(Pooling):
            alone = bounds.scores(case, page, "native", pooling=pooling, pages=count)
            with threads(2):
                scores = bounds.scores(case, page, "native", pooling=pooling, pages=count)
            expect_page_scores(scores, case, page, count, pooling)
            assert torch.equal(scores[0], alone[0])
            assert torch.equal(scores[1, :, : 160 // page], alone[1, :, : 160 // page])


@pytest.mark.parametrize("implementation", fast_index)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_that_are_no_bfloat16_numbers_lose_nothing(head_dim: int, implementation: Implementation) -> None:
    """More pages than are looked at together, and one query among others that are such numbers."""
    case = make_case(lengths=[301], kv_heads=1, group=5, head_dim=head_dim, dtype=torch.bfloat16)
    bounds = filled(bounds_of(case, 1), case, 1)
    for finer in (0.0, 2.0**-11):
        queries = case.q.float()
        queries[0, 3] *= 1 + finer
        asked = replace(case, q=queries)
        scores = bounds.scores(asked, 1, implementation, pooling="each")
        expect_page_scores(scores, asked, 1, bounds.lower.shape[2], "each")


@pytest.mark.parametrize("group", [7, 32])
def test_large_groups_are_bounded_in_parts(group: int) -> None:
    case = make_case(lengths=[70, 9], kv_heads=1, group=group, head_dim=64, dtype=torch.bfloat16)
    bounds = filled(bounds_of(case, 16), case, 16)
    for pooling in get_args(Pooling):
        scores = bounds.scores(case, 16, pooling=pooling)
        expect_page_scores(scores, case, 16, bounds.lower.shape[2], pooling)


@every_implementation
def test_rewritten_keys_leave_no_trace(implementation: Implementation) -> None:
    """Rectification shrinks a bound: a running minimum and maximum would keep the old one."""
    case = make_case(lengths=[40], kv_heads=1, group=1)
    bounds = bounds_of(case, 16)
    bounds.update(case.kv, 16, [0], 40, implementation)
    before = bounds.upper.clone()
    case.kv.k[0, 20:22] = 100.0
    bounds.update(case.kv, 16, [20], 2, implementation)
    assert bounds.upper[0, 0, 1].tolist() == [100.0] * 16
    case.kv.k[0, 20:22] = torch.tensor(case.keys[0][0][20:22])[:, None]
    bounds.update(case.kv, 16, [20], 2, implementation)
    assert torch.equal(bounds.upper[:, :, :3], before[:, :, :3])


@pytest.mark.parametrize("layout", ["paged", "columns"])
def test_many_updates(layout: str) -> None:
    """By two threads, of rows that begin anywhere."""
    case = make_case(layout=layout, lengths=[2600, 700], kv_heads=4, group=1, head_dim=64, page=32, padding=7)
    for implementation in every_index:
        with threads(2):
            expect_update(case, bounds_of(case, 16), 16, [0, 300], 2600, implementation)


def test_the_index_of_a_scorer_follows_its_table() -> None:
    """Scored and narrowed to heads through the table."""
    case = make_case(lengths=[37, 20])
    blocks = filled(bounds_of(case, 4, 2), case, 4)
    index, scorer = PageBounds(blocks.lower, blocks.upper, 4, blocks.table), PageBoundScorer(4)
    whole = scorer.score(case.q, case.kv, index)
    expect_page_scores(whole, case, 4, 10, "max")
    assert torch.equal(scorer.score(case.q[:, 2:], case.kv.heads(1, 2), index.heads(1, 2)), whole[:, 1:])


@needs_the_library
def test_bounds_that_the_library_cannot_take_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    good = make_case(lengths=[40], kv_heads=1)
    bounds = filled(bounds_of(good, 16), good, 16)
    lower, upper = bounds.lower, bounds.upper
    turned = lower.transpose(2, 3).contiguous().transpose(2, 3)
    many = replace(good, q=torch.cat([good.q] * 17, dim=1))
    short = replace(good, q=good.q[..., :8])
    for case, low, high, words in (
        (good, lower.half(), upper.half(), "float16"),
        (good, lower, upper.bfloat16(), "bfloat16"),
        (short, lower[..., :8], upper[..., :8], "head dim 8"),
        (good, turned, upper, "strides"),
        (many, lower, upper, "34 query heads"),
    ):
        odd = Bounds(low, high)
        refused(words, odd.scores, case, 16, "native")
        wanted = odd.scores(case, 16, "reference")
        torch.testing.assert_close(odd.scores(case, 16)[..., :3], wanted[..., :3])
    columns = make_case(layout="columns", page=3, lengths=[40], kv_heads=1)
    refused("strides", bounds.update, columns.kv, 16, [0], 40, "native")
    refused("bounds have strides", Bounds(turned, upper).update, good.kv, 16, [0], 40, "native")
    eight = small()
    refused("float8_e4m3fn", bounds_of(eight, 4).update, eight.kv, 4, [0, 0], 33, "native")
    refused("float8_e4m3fn", bounds_of(eight, 4).scores, eight, 4, "native")
    refused("the bounds are of a quantised cache", bounds.scores, good, 16, "native", k_scale=torch.ones(1))
    refused("unknown implementation", bounds.scores, good, 16, "fast")
    monkeypatch.setattr(native, "library", lambda: None)
    refused("no library", bounds.scores, good, 16, "native")


def test_arguments_that_do_not_fit_are_named() -> None:
    case = make_case(lengths=[40, 9], kv_heads=1, head_dim=4)
    blocks = filled(bounds_of(case, 4, 2), case, 4)
    lower, upper, table = blocks.lower, blocks.upper, blocks.table
    assert table is not None

    def update(*sides: torch.Tensor, table: torch.Tensor | None = None) -> None:
        Bounds(*sides, table).update(case.kv, 4, [0, 0], 1)

    for wrong, words in (
        (table.long(), "int32"),
        (table[:1], r"table must be \[2, n\]"),
        (table[0], r"table must be \[2, n\]"),
        (None, "without a table 2 rows"),
    ):
        refused(words, Bounds(lower, upper, wrong).scores, case, 4)
        refused(words, update, lower, upper, table=wrong)
    refused("13 pages are wanted, there is room for 12", blocks.scores, case, 4, pages=13)
    refused("-1 pages", blocks.scores, case, 4, pages=-1)
    refused(r"k_scale must be \[1\], got \[2\]", blocks.scores, case, 4, k_scale=torch.ones(2))
    refused("match", blocks.scores, replace(case, q=case.q[..., :2]), 4)
    refused(
        "filling must be the torch.float32 cache", blocks.scores, case, 4, filling=replace(case.kv, k=case.kv.k.half())
    )
    refused("8 pages of 4 cannot hold 40", update, lower, upper, table=table[:, :4])
    refused("float32", update, lower.half(), upper.half(), table=table)
    refused("bounds must be", update, lower[0], upper[0], table=table)
    refused("int32", page_scores, case.q, lower, upper, int32([40, 9]).long(), page=4, pooling="max", table=table)
