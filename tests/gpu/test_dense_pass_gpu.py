"""Triton's dense pass on a CUDA device against float64: every layout and dtype, long rows, a graph."""

from dataclasses import replace

import pytest
import torch
from device_caches import DIM, DTYPES, GROUP, KV_HEADS, SCALE, captured, expect_close, long_cache
from kernel_caches import LAYOUTS, make_case, moved, with_cap, with_sinks
from test_dense_pass import expect_pass, queries_of

from saccade.kernels.dense_pass.api import dense_pass
from saccade.types import Softmax


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_against_loops(dtype: torch.dtype, layout: str) -> None:
    """Rows of one token and of fewer than the pass has among them."""
    sizes = {"lengths": [131, 1, 64], "group": 3, "head_dim": 64, "padding": 7, "loose": 5}
    case = moved(make_case(layout=layout, **sizes, dtype=dtype))
    for count in (1, 5, 33):
        expect_pass(case, queries_of(case, count, 0), "triton")


@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (4, 128), (7, 80), (8, 96), (32, 16), (4, 256)])
def test_shapes_of_heads_sinks_and_caps(group: int, head_dim: int) -> None:
    sizes = {"lengths": [150, 77], "group": group, "head_dim": head_dim, "padding": 7}
    case = moved(with_cap(with_sinks(make_case(layout="paged", **sizes, dtype=torch.bfloat16), 0.0), 2.0))
    expect_pass(case, queries_of(case, 9, 0), "triton")


@pytest.mark.parametrize("page", [None, 16])
def test_long_rows_in_a_graph_whose_lengths_change(page: int | None) -> None:
    lengths, max_len, count = [40_000, 33_333], 40_960, 33
    kv, k, v = long_cache(lengths, page, max_len, 0)
    q = torch.randn((2, KV_HEADS * GROUP, count, DIM), device="cuda").bfloat16()
    graph, out = captured(lambda: dense_pass(q, kv, Softmax(SCALE), implementation="triton"))
    for one in (lengths, [39_000, 20]):
        kv.rows.seq_lens.copy_(torch.tensor(one))
        graph.replay()
        for place in range(count):
            ends = torch.tensor(one, device="cuda") - count + place + 1
            chosen = (torch.arange(max_len, device="cuda") < ends[:, None])[:, None].expand(-1, KV_HEADS, -1)
            expect_close(out[:, place], q[:, :, place], k, v, chosen)


def test_auto_takes_it() -> None:
    case = moved(make_case(layout="buffer", lengths=[90], kv_heads=2, group=2, head_dim=64, dtype=torch.bfloat16))
    q = queries_of(case, 5, 0)
    asked = dense_pass(q, case.kv, case.softmax, implementation="triton")
    assert torch.equal(dense_pass(q, case.kv, case.softmax), asked)
    whole = replace(case.kv, rows=replace(case.kv.rows, whole=torch.ones(1, dtype=torch.bool, device="cuda")))
    assert torch.equal(dense_pass(q, whole, case.softmax), asked)
