"""Page bounds in Triton: recomputed and scored as the oracle says, and compiled without spills."""

from typing import Any

import pytest
import torch
from compiling import Compiled, compile_kernel, expect_fit, pointers, signature_of
from kernel_caches import make_case
from kernel_checks import refused
from page_bounds_contract import *  # noqa: F403 - its tests, of these implementations
from page_bounds_contract import Bounds, bounds_of, expect_page_scores, filled
from quantised import (
    test_a_pages_score_bounds_those_of_its_tokens,  # noqa: F401
    test_bounds_are_numbers_of_the_cache,  # noqa: F401
)

from saccade.kernels._checks import NEIGHBOURS
from saccade.kernels.page_bounds import triton as kernels
from saccade.types import Pooling
from walking import walk


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("page", [1, 16, 260])
def test_a_key_that_is_no_number_bounds_its_page(page: int) -> None:
    """Pages of one key, of several, and of more than a program holds at a time."""
    case = make_case(lengths=[300], group=1)
    case.kv.k[0, 130, 1, 3] = torch.nan
    bounds = bounds_of(case, page)
    bounds.update(case.kv, page, [120], 20, "triton")
    for side in (bounds.lower, bounds.upper):
        broken = side[0, :, 120 // page : 139 // page + 1].isnan()
        assert broken[1, 130 // page - 120 // page, 3] and broken.sum() == 1


@pytest.mark.parametrize(
    ("dot", "pooling", "group", "tiles"), [(False, "max", 1, 1), (True, "each", 3, 3), (True, "max", 9, 1)]
)
def test_every_way_to_cut_the_work(
    dot: bool, pooling: Pooling, group: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several programs for a row, several tiles for a program; rows that end within one, before one and at an edge."""
    cut = kernels.Plan(dot=dot, pages=16, tiles=tiles, warps=4, stages=1)
    monkeypatch.setattr(kernels, "plan", lambda *_: cut)
    case = make_case(lengths=[150, 96, 5], group=group, head_dim=24, dtype=torch.float16)
    bounds = filled(bounds_of(case, 2), case, 2)
    scores = bounds.scores(case, 2, "triton", pooling=pooling)
    expect_page_scores(scores, case, 2, bounds.lower.shape[2], pooling)


@pytest.mark.parametrize("group", [3, 1])
def test_the_best_of_neighbours(group: int) -> None:
    """Of whole tiles of a row, where a program has them together: on tensor cores, and of sets per KV head."""
    case = make_case(lengths=[150, 96, 5], group=group, head_dim=24, dtype=torch.float16)
    bounds = filled(bounds_of(case, 1), case, 1)
    for pooling in ("max", "mean", "each"):
        scores, tiles = bounds.scored(case, 1, "triton", pooling=pooling)
        assert (tiles is not None) == (group > 1 and pooling == "max")
        for row, length in enumerate(case.lengths if tiles is not None else ()):
            whole = length // NEIGHBOURS
            best = scores[row, :, : whole * NEIGHBOURS].unflatten(1, (whole, NEIGHBOURS)).amax(2)
            assert torch.equal(tiles[row, :, :whole], best)


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


def test_what_it_cannot_take_is_named() -> None:
    case = make_case(lengths=[4], kv_heads=1, group=1, head_dim=8)
    wide = Bounds(*torch.zeros(2, 1, 1, 1, 520))
    wrong = make_case(lengths=[4], kv_heads=1, group=1, head_dim=520)
    refused("'triton' cannot take this call: head dim 520 is above 512", wide.scores, wrong, 4, "triton")
    doubled = Bounds(*torch.zeros(2, 1, 1, 1, 8, dtype=torch.float64))
    refused(r"'triton' cannot take this call: a tensor is torch\.float64", doubled.scores, case, 4, "triton")


STEPS = ("block_step", "head_step", "page_step", "row_step", "slot_step")
INDEXES = dict.fromkeys("page_table row_start seq_lens start table".split(), "*i32")
ONES = dict.fromkeys(("q_dim_step", "k_dim_step", "lower_dim_step", "upper_dim_step"), 1)


def compiled(kernel: Any, kinds: dict[str, str], constants: dict[str, Any], **how: int) -> Compiled:
    """Of bounds behind a table; other steps than those of tables and scales are whole numbers of 16."""
    signature = signature_of(kernel, INDEXES | kinds, ONES)
    constants = {name: one for name, one in ONES.items() if name in kernel.arg_names} | constants | {"TABLED": True}
    divisible = (*pointers(signature), *(name for name in signature if name.endswith(STEPS) or name == "page"))
    return compile_kernel(kernels.__name__, kernel.__name__, signature, constants, divisible, **how)


def compiled_score(
    dtype: str, group: int, head_dim: int, cut: kernels.Plan, pooling: Pooling, capability: int
) -> Compiled:
    query = "bf16" if dtype.startswith("fp8") else dtype
    kinds = {"q": f"*{query}"} | dict.fromkeys(("k", "lower", "upper"), f"*{dtype}")
    kinds |= dict.fromkeys(("k_scale", "scores", "tiles"), "*fp32")
    constants = {"SCALED": dtype.startswith("fp8"), "POOLING": pooling, "DOT": cut.dot, "PAGES": cut.pages}
    constants |= {"GROUP": group, "HEAD_DIM": head_dim, "MEMBERS": max(1 << (group - 1).bit_length(), 8), "FILLED": 16}
    constants |= {"NEAR": NEIGHBOURS if cut.dot and pooling == "max" else 0, "DIMS": 1 << (head_dim - 1).bit_length()}
    constants |= {"TOKENS": kernels.tokens_at_once(16, head_dim)}
    how = {"capability": capability, "warps": cut.warps, "stages": cut.stages}
    return compiled(kernels._score, kinds, constants, **how)


@pytest.mark.parametrize(
    ("dtype", "group", "head_dim", "pooling", "capability"),
    [
        ("bf16", 4, 128, "max", 80),
        ("bf16", 4, 128, "max", 90),
        pytest.param("bf16", 4, 128, "max", 100, marks=walk),
        pytest.param("bf16", 4, 128, "max", 120, marks=walk),
        ("bf16", 7, 64, "each", 90),
        ("bf16", 8, 128, "mean", 90),
        ("fp32", 8, 128, "max", 90),
        ("fp8e4nv", 7, 64, "each", 90),
        ("fp8e4nv", 8, 128, "mean", 90),
        ("fp8e4nv", 8, 128, "max", 90),
    ],
)
def test_scores_compile_without_spills(
    dtype: str, group: int, head_dim: int, pooling: Pooling, capability: int
) -> None:
    numbers = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8e4nv": torch.float8_e4m3fn}[dtype]
    query = torch.empty(1, group, head_dim, dtype=torch.bfloat16 if dtype == "fp8e4nv" else numbers)
    bounds = torch.empty(1, 1, 1, head_dim, dtype=numbers)
    cut = kernels.plan(query, bounds, bounds, pooling)
    assert cut.dot == (dtype != "fp32" and pooling != "mean")
    made = compiled_score(dtype, group, head_dim, cut, pooling, capability)
    # At least ten warps on a multiprocessor: fewer could not keep its memory busy.
    expect_fit(made, 200)
    # Both sides come in 16 bytes per thread and load: eight 16-bit numbers.
    assert dtype == "fp8e4nv" or made.ptx.count("ld.global.v4") >= 2 or "cp.async" in made.ptx
    assert (("wgmma" in made.ptx) or ("mma.sync" in made.ptx)) == cut.dot


@pytest.mark.parametrize(
    ("head_dim", "page", "capability", "dtype"), [(64, 16, 90, "fp8e4nv"), (128, 64, 90, "bf16"), (128, 16, 80, "bf16")]
)
def test_updates_compile_without_spills(head_dim: int, page: int, capability: int, dtype: str) -> None:
    constants = {"FILLED": True, "PAGE": page, "HEAD_DIM": head_dim, "DIMS": head_dim}
    made = compiled(
        kernels._update,
        dict.fromkeys(("k", "lower", "upper"), f"*{dtype}"),
        {**constants, "TOKENS": kernels.tokens_at_once(page, head_dim)},
        capability=capability,
        warps=1 if page == 16 else 2,
    )
    expect_fit(made, 128)  # sixteen warps on a multiprocessor
    assert ("cp.async" in made.ptx) == (page > 16)  # a loop
    assert "ld.global.v4" in made.ptx or "cp.async" in made.ptx
