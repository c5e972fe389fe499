"""The mask of the best in Triton's interpreter, and what the compiler makes of its kernel."""

from __future__ import annotations

import pytest
import torch
from compiling import compile_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_best_of_each import expect_best
from test_triton_topk import STYLES, make_scores

from saccade.errors import KernelError
from saccade.kernels.best_of_each.api import WIDEST, best_of_each

SIGNATURE = {"scores": "*fp32", "counts": "*i32", "chosen": "*i1", "rows": "i32", "width": "i32"}


@settings(max_examples=30)
@given(st.integers(1, 2), st.integers(1, 4), st.integers(1, 1400), st.sampled_from(STYLES), st.integers(0, 2**31))
def test_the_oracle(heads: int, rows: int, width: int, style: str, seed: int) -> None:
    counts = torch.randint(1, width + 1, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()
    expect_best(make_scores(style, (heads, rows, width), seed), counts, "triton")


def test_rows_that_no_program_holds_are_refused() -> None:
    with pytest.raises(KernelError, match=f"longer than {WIDEST}"):
        best_of_each(torch.zeros(1, 1, WIDEST + 1), torch.ones(1, dtype=torch.int32), implementation="triton")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("held", "warps"), [(1024, 4), (4096, 8), (8192, 16)])
def test_compiled_without_spills(held: int, warps: int, capability: int) -> None:
    """The widest rows, of 16,384, spill a few words of 128 registers."""
    divisible = ("scores", "counts", "chosen")
    compiled = compile_kernel(
        "saccade.kernels.best_of_each.triton", "_mark", SIGNATURE, {"HELD": held}, divisible,
        capability=capability, warps=warps,
    )  # fmt: skip
    assert compiled.spilled == 0
