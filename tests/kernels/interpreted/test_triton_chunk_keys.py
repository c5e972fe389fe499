"""Chunk keys in Triton: of the chunks' own slots alone, in every layout, and compiled without spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compiling import compile_kernel, expect_fit
from hypothesis import given
from hypothesis import strategies as st
from kernel_caches import Case, cases, make_case
from kernel_checks import DEVICES
from test_chunk_keys import edges_of, expect, expect_that_nothing_else_matters, table

from saccade.errors import KernelError
from saccade.kernels.chunk_keys.api import chunk_keys
from walking import drawn


@drawn(25)
@given(cases(longest=60, dtypes=(torch.float32, torch.float16), head_dims=(1, 8, 24, 80)), st.data())
def test_against_float64(case: Case, data: st.DataObject) -> None:
    expect(case, data.draw(edges_of(case.lengths)), "mean", "triton")


def test_chunks_longer_than_a_program_reads_at_a_time() -> None:
    """128 tokens of 16 numbers: chunks of several such parts, the last of them partial, full and of one token."""
    case = make_case(layout="paged", lengths=[900, 129], kv_heads=2, group=1, head_dim=16, padding=3)
    expect(case, [[3, 4, 300, 300, 556, 685, 900], [0, 129]], "mean", "triton")


def test_what_lies_in_no_chunk_does_not_matter() -> None:
    expect_that_nothing_else_matters("triton")


def test_a_key_that_is_no_number_marks_its_chunk() -> None:
    case = make_case(layout="buffer", lengths=[400], kv_heads=2, group=1, head_dim=16)
    case.kv.k[0, 150, 1, 3] = torch.nan
    options = {"longest": 240, "implementation": "triton"}
    assert chunk_keys(case.kv, table([[0, 150, 390]]), **options).isnan().any(dim=-1).tolist() == [
        [[False, False], [False, True]]
    ]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised(dtype: torch.dtype) -> None:
    """Keys count as what they stand for."""
    case = make_case(layout="paged", lengths=[37], kv_heads=2, group=1, head_dim=16, padding=1)
    k = case.kv.k.to(dtype)
    for scale in (torch.tensor([0.25, 3.0]), torch.tensor([0.5])):
        kv = replace(case.kv, k=k, v=k, k_scale=scale, v_scale=scale)
        edges = table([[1, 9, 30]])
        means = [chunk_keys(kv, edges, longest=21, implementation=name) for name in ("triton", "reference")]
        torch.testing.assert_close(*means, rtol=1e-5, atol=1e-6)


def test_what_it_cannot_take_is_named() -> None:
    case = make_case(layout="buffer", lengths=[8], kv_heads=1, group=1, head_dim=4)
    wide = replace(case.kv, k=case.kv.k.double(), v=case.kv.v.double())
    with pytest.raises(KernelError, match=r"'triton' cannot take this call: a tensor is torch\.float64"):
        chunk_keys(wide, table([[0, 4]]), longest=4, implementation="triton")
    with pytest.raises(KernelError, match="'triton' cannot take this call: pooling=max has a reference alone"):
        chunk_keys(case.kv, table([[0, 4]]), longest=4, pooling="max", implementation="triton")
    with pytest.raises(KernelError, match="unknown implementation 'cpu'; use auto, reference, native or triton"):
        chunk_keys(case.kv, table([[0, 4]]), longest=4, implementation="cpu")


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_compiles_without_spills(head_dim: int, capability: int) -> None:
    pointers = {"k": "*bf16", "pooled": "*fp32", "k_scale": "*fp32"}
    indexes = ("page_table", "row_start", "edges")
    steps = ("k_page_step", "k_slot_step", "k_head_step")
    others = ("page_table_step", "k_scale_step", "kv_heads", "kv_page", "chunks")
    compiled = compile_kernel(
        "saccade.kernels.chunk_keys.triton",
        "_pool",
        {**pointers, **dict.fromkeys(indexes, "*i32"), **dict.fromkeys((*steps, *others), "i32")},
        {"k_dim_step": 1, "SCALED": False, "HEAD_DIM": head_dim, "DIMS": head_dim, "TOKENS": 2048 // head_dim},
        (*pointers, *indexes, *steps),
        capability=capability,
    )
    expect_fit(compiled, 128)
    assert "cp.async" in compiled.ptx
