"""Chunk keys on a CUDA device: bfloat16 against the budgets of float32, fp8 against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_caches import make_case
from test_chunk_keys import expect, expect_bounds
from test_page_bounds_gpu import on_device

from saccade.kernels.chunk_keys.api import chunk_bounds, chunk_keys


@pytest.mark.parametrize("layout", ["buffer", "paged", "interleaved", "strided"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_against_float64(layout: str, head_dim: int) -> None:
    case = make_case(
        layout=layout, lengths=[300, 129], kv_heads=2, group=1, head_dim=head_dim, dtype=torch.bfloat16, padding=7
    )
    case = replace(case, kv=on_device(case.kv))
    for row, edges in ((0, [0, 1, 17, 33, 260, 300]), (1, [5, 6, 129])):
        expect(case, row, edges, "mean", "triton")
        expect(case, row, edges, "max", "triton")
        expect_bounds(case, row, edges, "triton")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised(dtype: torch.dtype) -> None:
    kv = on_device(make_case(layout="paged", lengths=[300], kv_heads=2, group=1, head_dim=64, padding=1).kv)
    scale = torch.tensor([0.25, 3.0], device="cuda")
    kv = replace(kv, k=kv.k.to(dtype), v=kv.v.to(dtype), k_scale=scale, v_scale=scale)
    edges = [1, 9, 30, 200]
    wanted = chunk_bounds(kv, 0, edges, implementation="reference")
    for got, want in zip(chunk_bounds(kv, 0, edges, implementation="triton"), wanted, strict=True):
        assert torch.equal(got, want)
    means = [chunk_keys(kv, 0, edges, implementation=name) for name in ("triton", "reference")]
    torch.testing.assert_close(*means, rtol=1e-5, atol=1e-6)
