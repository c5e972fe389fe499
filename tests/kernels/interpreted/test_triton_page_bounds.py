"""Page bounds in Triton: recomputed and scored as the oracle says, and compiled without spills for two GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import Compiled, compile_kernel, expect_fit
from hypothesis import given
from hypothesis import strategies as st
from kernel_caches import Case, cases, int32, make_case
from kernel_checks import DEVICES, poolings
from quantised import expect_bound_scores, expect_bounds, quantised
from test_page_bounds import (
    expect_page_scores,
    expect_update,
    fresh,
    poisoned,
    scores_of,
    test_a_row_may_have_no_page,  # noqa: F401 - of the kernels
)
from test_paged_bounds import expect_update as expect_paged_update
from test_paged_bounds import (
    filled,
    scattered,
    test_rows_that_share_a_block,  # noqa: F401
)
from test_paged_bounds import test_a_row_may_have_no_page as test_a_row_of_a_table_may_have_no_page  # noqa: F401

from saccade.errors import KernelError
from saccade.kernels.page_bounds import triton as kernels
from saccade.kernels.page_bounds.api import page_scores, update_page_bounds
from saccade.types import Pooling
from walking import among, drawn, in_turn, walk

dtypes = (torch.float32, torch.float16)
pages = st.sampled_from((1, 3, 16, 40))


@drawn(25)
@given(cases(dtypes=dtypes, head_dims=(1, 8, 24, 80)), pages, st.data())
def test_only_touched_pages_are_recomputed(case: Case, page: int, data: st.DataObject) -> None:
    starts = [data.draw(st.integers(-2, case.kv.rows.max_len + page)) for _ in case.lengths]
    count, filled = data.draw(st.integers(0, case.kv.rows.max_len)), data.draw(st.booleans())
    if min(starts) >= 0:
        expect_update(case, page, starts, count, "triton", filled)
    per_block = data.draw(st.sampled_from((1, 2, 3)))
    wanted, got = scattered(case, page, per_block), scattered(case, page, per_block)
    given: Any = {"page": page, "start": int32(starts), "count": count, "filled": filled}
    for blocks, how in ((wanted, "reference"), (got, "triton")):
        update_page_bounds(blocks.lower, blocks.upper, case.kv, table=blocks.table, **given, implementation=how)
    for have, want in ((got.lower, wanted.lower), (got.upper, wanted.upper)):
        torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("page", "per_block"), among([(1, 2), (2, 2), (3, 1)], [(2, 2)]))
def test_every_start_and_count(page: int, per_block: int) -> None:
    case = make_case(layout="paged", lengths=[9, 7], kv_heads=1, group=1, head_dim=16, padding=1)
    for start in range(11):
        for count in (0, 1, 2, 3, 4, 7, 10):
            starts = [start, max(start - 2, 0)]
            expect_paged_update(case, scattered(case, page, per_block), page, starts, count, "triton")


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("page", [1, 16, 260])
def test_a_key_that_is_no_number_bounds_its_page(page: int) -> None:
    """Pages of one key, of several, and of more than a program holds at a time."""
    case = make_case(layout="buffer", lengths=[300], kv_heads=2, group=1, head_dim=16)
    case.kv.k[0, 130, 1, 3] = torch.nan
    lower, upper = poisoned(case, page)
    start = int32([120])
    update_page_bounds(lower, upper, case.kv, page=page, start=start, count=20, implementation="triton")
    for bounds in (lower, upper):
        broken = bounds[0, :, 120 // page : 139 // page + 1].isnan()
        assert broken[1, 130 // page - 120 // page, 3] and broken.sum() == 1


@drawn(25)
@given(
    cases(dtypes=dtypes, head_dims=(1, 8, 24, 80)),
    st.sampled_from((1, 3, 16)),
    st.sampled_from((1, 2, 3)),
    poolings,
    st.sampled_from((-1, 0, 1, None)),
)
def test_page_scores_match_the_oracle(
    case: Case, page: int, per_block: int, pooling: Pooling, more: int | None
) -> None:
    lower, upper = fresh(case, page)
    lengths = case.kv.rows.seq_lens
    scores = page_scores(case.q, lower, upper, lengths, page=page, pooling=pooling, implementation="triton")
    expect_page_scores(scores, case, page, lower.shape[2], pooling)
    blocks = filled(case, page, per_block)
    room = blocks.table.shape[1] * per_block
    wanted = None if more is None else min(-(-max(case.lengths) // page) + more, room)
    given: Any = {"page": page, "pooling": pooling, "table": blocks.table, "pages": wanted}
    scores = page_scores(case.q, blocks.lower, blocks.upper, lengths, **given, implementation="triton")
    expect_page_scores(scores, case, page, room if wanted is None else wanted, pooling)


@pytest.mark.parametrize(("dot", "pooling"), in_turn([False, True], ["max", "each"]))
@pytest.mark.parametrize(("group", "tiles"), in_turn((1, 3, 9), (1, 3)))
def test_every_way_to_cut_the_work(
    dot: bool, pooling: Pooling, group: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several programs for a row, several tiles for a program; rows that end within one, before one and at an edge."""
    cut = kernels.Plan(dot=dot, pages=16, tiles=tiles, warps=4, stages=1)
    monkeypatch.setattr(kernels, "plan", lambda *_: cut)
    case = make_case(layout="buffer", lengths=[150, 96, 5], kv_heads=2, group=group, head_dim=24, dtype=torch.float16)
    lower, upper = fresh(case, 2)
    scores = page_scores(case.q, lower, upper, case.kv.rows.seq_lens, page=2, pooling=pooling, implementation="triton")
    expect_page_scores(scores, case, 2, lower.shape[2], pooling)


def test_which_queries_meet_tensor_cores() -> None:
    """Those whose parts are exact in the type that the bounds are read in, where there are enough of them."""
    half = torch.empty(1, 8, 64, dtype=torch.float16)
    bounds = torch.empty(1, 2, 5, 64, dtype=torch.float16)
    assert kernels.plan(half, bounds, bounds, "max").dot and kernels.plan(half, bounds, bounds, "each").dot
    quantised = bounds.to(torch.float8_e5m2)
    assert kernels.plan(half, quantised, quantised, "max").dot
    assert not kernels.plan(half, bounds, bounds, "mean").dot
    assert not kernels.plan(half.float(), bounds, bounds, "max").dot
    assert not kernels.plan(half.float(), bounds.float(), bounds.float(), "max").dot
    assert not kernels.plan(half, bounds, bounds.float(), "max").dot
    assert not kernels.plan(half.bfloat16(), bounds, bounds, "max").dot
    assert not kernels.plan(half[:, :4], bounds, bounds, "max").dot


@pytest.mark.parametrize(("dtype", "pooling"), in_turn(dtypes, ["max", "mean", "each"]))
def test_a_query_that_is_no_number_does_not_pass_for_one(dtype: torch.dtype, pooling: Pooling) -> None:
    case = make_case(layout="buffer", lengths=[9], kv_heads=2, group=3, head_dim=16, dtype=dtype)
    lower, upper = fresh(case, 4)
    case.q[0, 1, 3] = torch.nan
    scores = page_scores(case.q, lower, upper, case.kv.rows.seq_lens, page=4, pooling=pooling, implementation="triton")
    broken = scores[0, :, :3].isnan()
    assert broken[1 if pooling == "each" else 0].all() and broken.sum() == 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("query", "pooling"), in_turn(dtypes, ["max", "mean", "each"]))
def test_quantised(dtype: torch.dtype, query: torch.dtype, pooling: Pooling) -> None:
    """Bounds hold the cache's numbers as they are stored, and the scores are those of what they stand for."""
    plain = make_case(layout="paged", lengths=[37, 20], kv_heads=2, group=3, head_dim=16, padding=1)
    for scale in (torch.tensor([0.25, 3.0]), torch.tensor([3.0])):
        case = quantised(plain, scale, scale, query, dtype)
        for implementation in ("reference", "triton"):
            expect_bounds(case, 4, [0, 0], 37, implementation)
            expect_bound_scores(case, 4, pooling, implementation)


def test_what_it_cannot_take_is_named() -> None:
    case = make_case(layout="buffer", lengths=[4], kv_heads=1, group=1, head_dim=8)
    lower, upper = fresh(case, 4)
    lengths, wide = case.kv.rows.seq_lens, torch.zeros(1, 1, 1, 520)
    with pytest.raises(KernelError, match="'triton' cannot take this call: head dim 520 is above 512"):
        page_scores(torch.zeros(1, 1, 520), wide, wide, lengths, page=4, pooling="max", implementation="triton")
    with pytest.raises(KernelError, match=r"'triton' cannot take this call: a tensor is torch\.float64"):
        page_scores(case.q, lower.double(), upper.double(), lengths, page=4, pooling="max", implementation="triton")
    with pytest.raises(KernelError, match=r"k_scale must be \[1\], got \[2\]"):
        page_scores(case.q, lower, upper, lengths, page=4, pooling="max", k_scale=torch.ones(2))
    with pytest.raises(KernelError, match="the bounds are of a quantised cache"):
        scores_of(case, (lower, upper), 4, "native", k_scale=torch.ones(1))


MODULE = "saccade.kernels.page_bounds.triton"


def compiled_score(
    dtype: str, group: int, head_dim: int, cut: kernels.Plan, pooling: Pooling, capability: int
) -> Compiled:
    steps = [f"{side}_{step}_step" for side in ("lower", "upper") for step in ("block", "head", "page")] + [
        "q_row_step",
        "q_head_step",
    ]
    query = "bf16" if dtype.startswith("fp8") else dtype
    pointers = {"q": query, "lower": dtype, "upper": dtype, "seq_lens": "i32", "table": "i32", "k_scale": "fp32"}
    signature = {name: f"*{kind}" for name, kind in {**pointers, "scores": "fp32"}.items()}
    constants: dict[str, Any] = {
        **dict.fromkeys(("q_dim_step", "lower_dim_step", "upper_dim_step"), 1),
        "TABLED": True,
        "SCALED": dtype.startswith("fp8"),
        "POOLING": pooling,
        "DOT": cut.dot,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "MEMBERS": max(1 << (group - 1).bit_length(), 8),
        "DIMS": 1 << (head_dim - 1).bit_length(),
        "PAGES": cut.pages,
    }
    others = ("table_step", "k_scale_step", "kv_heads", "block_pages", "page", "pages", "scores_step", "parts")
    return compile_kernel(
        MODULE,
        "_score",
        {**signature, **dict.fromkeys((*steps, *others), "i32")},
        constants,
        (*signature, *steps, "page"),
        capability=capability,
        warps=cut.warps,
        stages=cut.stages,
    )


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "group", "head_dim", "pooling"),
    [("bf16", 4, 128, "max"), ("bf16", 7, 64, "each"), ("bf16", 8, 128, "mean"), ("fp32", 8, 128, "max")],
)
def test_scores_compile_without_spills(
    dtype: str, group: int, head_dim: int, pooling: Pooling, capability: int
) -> None:
    numbers = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    bounds = torch.empty(1, 1, 1, head_dim, dtype=numbers)
    cut = kernels.plan(torch.empty(1, group, head_dim, dtype=numbers), bounds, bounds, pooling)
    assert cut.dot == (dtype == "bf16" and pooling != "mean")
    compiled = compiled_score(dtype, group, head_dim, cut, pooling, capability)
    # At least ten warps on a multiprocessor: fewer could not keep its memory busy.
    expect_fit(compiled, 200)
    # Both sides come in 16 bytes per thread and load: eight 16-bit numbers.
    assert compiled.ptx.count("ld.global.v4") >= 2 or "cp.async" in compiled.ptx
    assert (("wgmma" in compiled.ptx) or ("mma.sync" in compiled.ptx)) == cut.dot


@pytest.mark.parametrize(
    ("group", "head_dim", "pooling"), [(4, 128, "max"), (7, 64, "each"), (8, 128, "mean"), (8, 128, "max")]
)
def test_quantised_scores_compile_for_what_has_the_type(group: int, head_dim: int, pooling: Pooling) -> None:
    bounds = torch.empty(1, 1, 1, head_dim, dtype=torch.float8_e4m3fn)
    cut = kernels.plan(torch.empty(1, group, head_dim, dtype=torch.bfloat16), bounds, bounds, pooling)
    compiled = compiled_score("fp8e4nv", group, head_dim, cut, pooling, 90)
    expect_fit(compiled, 200)
    assert (("wgmma" in compiled.ptx) or ("mma.sync" in compiled.ptx)) == cut.dot == (pooling != "mean")


@pytest.mark.parametrize(("capability", "dtype"), [pytest.param(80, "bf16", marks=walk), (90, "bf16"), (90, "fp8e4nv")])
@pytest.mark.parametrize(("head_dim", "page"), [(64, 16), pytest.param(128, 16, marks=walk), (128, 64)])
def test_updates_compile_without_spills(head_dim: int, page: int, capability: int, dtype: str) -> None:
    pointers = dict.fromkeys(("k", "lower", "upper"), dtype)
    indexes = ("page_table", "row_start", "seq_lens", "start", "table")
    signature = {name: f"*{kind}" for name, kind in {**pointers, **dict.fromkeys(indexes, "i32")}.items()}
    steps = ["k_page_step", "k_slot_step", "k_head_step"] + [
        f"{side}_{step}_step" for side in ("lower", "upper") for step in ("block", "head", "page")
    ]
    others = ("page_table_step", "table_step", "kv_heads", "kv_page", "block_pages", "count")
    compiled = compile_kernel(
        MODULE,
        "_update",
        {**signature, **dict.fromkeys((*steps, *others), "i32")},
        {
            **dict.fromkeys(("k_dim_step", "lower_dim_step", "upper_dim_step"), 1),
            "TABLED": True,
            "FILLED": True,
            "PAGE": page,
            "HEAD_DIM": head_dim,
            "DIMS": head_dim,
            "TOKENS": kernels.tokens_at_once(page, head_dim),
        },
        (*signature, *steps),
        capability=capability,
        warps=1 if page == 16 else 2,
    )
    expect_fit(compiled, 128)  # sixteen warps on a multiprocessor
    assert ("cp.async" in compiled.ptx) == (page > 16)  # a loop
    assert "ld.global.v4" in compiled.ptx or "cp.async" in compiled.ptx
