"""Chunk keys on a CUDA device: bfloat16 against the budgets of float32, fp8 against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_caches import make_case, moved, moved_cache
from test_chunk_keys import expect, table

from saccade.kernels._dispatch import Implementation
from saccade.kernels.chunk_keys.api import chunk_keys


@pytest.mark.parametrize("layout", ["buffer", "paged", "interleaved", "strided"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_against_float64(layout: str, head_dim: int) -> None:
    sizes = {"lengths": [300, 129], "kv_heads": 2, "group": 1, "head_dim": head_dim, "padding": 7}
    case = moved(make_case(layout=layout, **sizes, dtype=torch.bfloat16))
    for edges in ([[0, 1, 17, 17, 33, 260, 300], [5, 6, 129]], [[], [0, 0, 129]]):
        for implementation in ("triton", "reference"):
            expect(case, edges, "mean", implementation)
        expect(case, edges, "max", "auto")


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_no_host_synchronisation(implementation: Implementation) -> None:
    kv = moved_cache(make_case(layout="paged", lengths=[300, 20], kv_heads=2, group=1, head_dim=64, padding=1).kv)
    edges = table([[1, 9, 9, 200], []], "cuda")
    wanted = chunk_keys(kv, edges, longest=191, implementation=implementation)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = chunk_keys(kv, edges, longest=191, implementation=implementation)
        chunk_keys(kv, edges, longest=191, pooling="max")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.equal(wanted)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised(dtype: torch.dtype) -> None:
    kv = moved_cache(make_case(layout="paged", lengths=[300], kv_heads=2, group=1, head_dim=64, padding=1).kv)
    scale = torch.tensor([0.25, 3.0], device="cuda")
    kv = replace(kv, k=kv.k.to(dtype), v=kv.v.to(dtype), k_scale=scale, v_scale=scale)
    edges = table([[1, 9, 30, 200]], "cuda")
    means = [chunk_keys(kv, edges, longest=170, implementation=name) for name in ("triton", "reference")]
    torch.testing.assert_close(*means, rtol=1e-5, atol=1e-6)
