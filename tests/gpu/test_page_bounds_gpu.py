"""Page bounds on a CUDA device: bfloat16 and fp8 against float64, where vLLM keeps them, and inside a CUDA graph."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import kernel_caches
import pytest
import torch
from kernel_budgets import SMALLEST, gamma
from kernel_caches import make_case, moved
from quantised import expect_bounds, quantised
from test_page_bounds import expect_update
from torch import Tensor

from saccade.adapters.vllm.cache_dtype import bounds_bytes
from saccade.adapters.vllm.worker.page_bounds import BlockBounds
from saccade.kernels.page_bounds.api import page_scores, update_page_bounds
from saccade.types import KVView, Pooling, Rows

PAGE = 16
poolings = get_args(Pooling)
int32 = partial(kernel_caches.int32, device="cuda")


def random_bounds(batch: int, kv_heads: int, pages: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    keys = torch.randn(batch, kv_heads, pages, 2, head_dim, device="cuda").to(dtype).float()
    return keys.amin(dim=3).to(dtype), keys.amax(dim=3).to(dtype)


def expect_scores(
    scores: Tensor, q: Tensor, lower: Tensor, upper: Tensor, lengths: list[int], page: int, pooling: Pooling
) -> None:
    """Against float64; bounds `[B, Hkv, P, d]` in logical order. The budget is that of two float32 products."""
    batch, kv_heads, pages, head_dim = lower.shape
    group = q.shape[1] // kv_heads
    queries = q.double().view(batch, kv_heads, group, head_dim)
    largest = queries.abs().amax(dim=2, keepdim=True)
    if pooling == "mean":
        queries = queries.mean(dim=2, keepdim=True)
    low, high = lower.double()[:, :, None], upper.double()[:, :, None]
    exact = torch.maximum(queries[:, :, :, None] * low, queries[:, :, :, None] * high).sum(dim=-1)
    size = 2 * (largest[:, :, :, None] * torch.maximum(low.abs(), high.abs())).sum(dim=-1)
    error = gamma(2 * head_dim + group + 2) * size + SMALLEST
    if pooling == "max":
        exact = exact.amax(dim=2, keepdim=True)
    error = error.expand_as(exact).flatten(1, 2)
    exact = exact.flatten(1, 2)
    assert scores.dtype == torch.float32 and scores.shape == exact.shape
    for row, length in enumerate(lengths):
        used = min(-(-length // page), pages)
        assert (scores[row, :, :used].double() - exact[row, :, :used]).abs().le(error[row, :, :used]).all()


@pytest.mark.parametrize("pooling", poolings)
@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"),
    [
        (1, 128, torch.bfloat16),
        (4, 128, torch.bfloat16),
        (7, 64, torch.bfloat16),
        (8, 80, torch.bfloat16),
        (4, 16, torch.float16),
        (33, 64, torch.bfloat16),
        (4, 256, torch.bfloat16),
        (4, 128, torch.float32),
    ],
)
def test_scores_against_float64(group: int, head_dim: int, dtype: torch.dtype, pooling: Pooling) -> None:
    lengths = [3001, 1, 512, 3200]
    lower, upper = random_bounds(4, 2, 200, head_dim, dtype)
    q = torch.randn(4, 2 * group, head_dim, device="cuda").to(dtype)
    poisoned = [bounds.clone() for bounds in (lower, upper)]
    for bounds in poisoned:
        for row, length in enumerate(lengths):
            bounds[row, :, -(-length // PAGE) :] = torch.nan
    scores = page_scores(q, *poisoned, int32(lengths), page=PAGE, pooling=pooling, implementation="triton")
    expect_scores(scores, q, lower, upper, lengths, PAGE, pooling)
    again = page_scores(q, *poisoned, int32(lengths), page=PAGE, pooling=pooling)
    for row, length in enumerate(lengths):
        assert torch.equal(scores[row, :, : -(-length // PAGE)], again[row, :, : -(-length // PAGE)])


@pytest.mark.parametrize("pooling", poolings)
def test_queries_of_another_type(pooling: Pooling) -> None:
    """What bfloat16 cannot hold does not pass through it."""
    lower, upper = random_bounds(2, 2, 50, 64, torch.bfloat16)
    for dtype in (torch.float32, torch.float16):
        q = torch.randn(2, 8, 64, device="cuda").to(dtype)
        scores = page_scores(q, lower, upper, int32([800, 77]), page=PAGE, pooling=pooling, implementation="triton")
        expect_scores(scores, q, lower, upper, [800, 77], PAGE, pooling)


@pytest.mark.parametrize("pooling", poolings)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_scores_against_float64(dtype: torch.dtype, pooling: Pooling) -> None:
    lower, upper = random_bounds(2, 4, 130, 128, dtype)
    scale = torch.tensor([0.25, 1.0, 2.0, 0.5], device="cuda")
    q = torch.randn(2, 16, 128, device="cuda").bfloat16()
    lengths = [2080, 999]
    scores = page_scores(
        q, lower, upper, int32(lengths), page=PAGE, pooling=pooling, k_scale=scale, implementation="triton"
    )
    low, high = (bounds.double() * scale[:, None, None] for bounds in (lower, upper))
    expect_scores(scores, q, low, high, lengths, PAGE, pooling)


@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize("layout", ["buffer", "paged", "interleaved", "strided"])
def test_updates_are_exact(layout: str, page: int) -> None:
    """Only the touched pages are written, whatever lies between tokens."""
    sizes = {"lengths": [150, 33, 97], "kv_heads": 2, "group": 1, "head_dim": 80, "padding": 7}
    case = moved(make_case(layout=layout, **sizes, dtype=torch.bfloat16))
    expect_update(case, page, [20, 0, 200], 40, "triton")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_updates_are_exact(dtype: torch.dtype) -> None:
    case = make_case(layout="paged", lengths=[150, 33], kv_heads=2, group=1, head_dim=64, padding=1)
    one = torch.ones(2)
    expect_bounds(moved(quantised(case, one, one, torch.bfloat16, dtype)), PAGE, [0, 0], 150, "triton")


def test_bounds_behind_blocks_of_a_serving_engine() -> None:
    """In the padding of its pages, through its block table; all other memory stays as it is."""
    block, kv_heads, head_dim, blocks = 64, 4, 64, 40
    room = bounds_bytes(block, PAGE, kv_heads, head_dim, 2) // 2
    content = kv_heads * block * 2 * head_dim
    storage = torch.full((blocks, content + room), torch.nan, dtype=torch.bfloat16, device="cuda")
    cache = storage[:, :content].unflatten(1, (kv_heads, block, 2 * head_dim))
    lengths = [700, 65, 1]
    table = torch.full((3, 12), 10**6, dtype=torch.int32)
    numbers = torch.randperm(blocks).tolist()
    for row, length in enumerate(lengths):
        for index in range(-(-length // block)):
            table[row, index] = numbers.pop()
            cache[table[row, index], :, : min(length - index * block, block)] = torch.randn(
                kv_heads, min(length - index * block, block), 2 * head_dim, device="cuda"
            ).bfloat16()
    k, v = (part.transpose(1, 2) for part in cache.split(head_dim, dim=-1))
    rows = Rows(table.cuda(), int32([0, 0, 0]), int32(lengths), 12 * block)
    kv = KVView(k, v, rows)
    bounds = BlockBounds.behind(cache, block, head_dim, PAGE)
    before = storage.clone()
    given: Any = {"page": PAGE, "table": rows.page_table, "implementation": "triton"}
    update_page_bounds(bounds.lower, bounds.upper, kv, start=int32([0, 0, 0]), count=700, **given)
    torch.testing.assert_close(storage[:, :content], before[:, :content], rtol=0, atol=0, equal_nan=True)
    pages = -(-700 // PAGE)
    lower, upper = torch.zeros(2, 3, kv_heads, pages, head_dim, device="cuda", dtype=torch.bfloat16)
    for row, length in enumerate(lengths):
        for number in range(-(-length // PAGE)):
            place, inside = int(table[row, number * PAGE // block]), number * PAGE % block
            keys = k[place, inside : inside + min(PAGE, length - number * PAGE)]
            lower[row, :, number], upper[row, :, number] = keys.float().amin(dim=0), keys.float().amax(dim=0)
    written = sum(-(-length // PAGE) for length in lengths) * kv_heads * 2 * head_dim
    assert int(storage[:, content:].isfinite().sum()) == written
    q = torch.randn(3, 4 * kv_heads, head_dim, device="cuda").bfloat16()
    for pooling in poolings:
        scores = page_scores(q, bounds.lower, bounds.upper, rows.seq_lens, pooling=pooling, pages=pages, **given)
        expect_scores(scores, q, lower, upper, lengths, PAGE, pooling)


@pytest.mark.parametrize("pooling", poolings)
def test_a_graph_follows_lengths(pooling: Pooling) -> None:
    """Captured at one length, replayed at others that begin a page, fill one, or shrink; unused memory is NaN."""
    capacity, kv_heads, head_dim, group = 900, 2, 128, 4
    lengths = [100, 31]
    keys = torch.randn(2, kv_heads, capacity, head_dim, device="cuda").bfloat16()
    cache = torch.full_like(keys, torch.nan)
    seq_lens, start = int32(lengths), int32([0, 0])
    rows = Rows(int32([0, 1])[:, None], int32([0, 0]), seq_lens, capacity)
    kv = KVView(cache.transpose(1, 2), cache.transpose(1, 2), rows)
    pages = -(-capacity // PAGE)
    lower, upper = torch.full((2, 2, kv_heads, pages, head_dim), torch.nan, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(2, kv_heads * group, head_dim, device="cuda").bfloat16()

    def step(count: int) -> Tensor:
        update_page_bounds(lower, upper, kv, page=PAGE, start=start, count=count, implementation="triton")
        return page_scores(q, lower, upper, seq_lens, page=PAGE, pooling=pooling, implementation="triton")

    for row, length in enumerate(lengths):
        cache[row, :, :length] = keys[row, :, :length]
    step(capacity)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(2)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = step(2)
    held = lengths
    for now in ([102, 33], [104, 35], [112, 48], [113, 49], [113, 50], [115, 52]):
        for row, (before, length) in enumerate(zip(held, now, strict=True)):
            cache[row, :, before:length] = keys[row, :, before:length]
        seq_lens.copy_(int32(now))
        start.copy_(int32([length - 2 for length in now]))
        q.copy_(torch.randn_like(q))
        graph.replay()
        exact = [torch.zeros(2, kv_heads, pages, head_dim, device="cuda") for _ in range(2)]
        for row, length in enumerate(now):
            for number in range(-(-length // PAGE)):
                page = keys[row, :, number * PAGE : min(number * PAGE + PAGE, length)].float()
                exact[0][row, :, number], exact[1][row, :, number] = page.amin(dim=1), page.amax(dim=1)
        expect_scores(scores, q, exact[0], exact[1], now, PAGE, pooling)
        held = now
    seq_lens.copy_(int32([1, 0]))
    start.copy_(int32([5, 5]))
    graph.replay()
    assert scores[0, :, 0].isfinite().all()


def test_a_query_that_is_no_number_does_not_pass_for_one() -> None:
    lower, upper = random_bounds(1, 2, 3, 64, torch.bfloat16)
    q = torch.randn(1, 8, 64, device="cuda").bfloat16()
    q[0, 1, 3] = torch.nan
    for pooling in poolings:
        scores = page_scores(q, lower, upper, int32([40]), page=PAGE, pooling=pooling, implementation="triton")
        broken = scores.isnan()
        assert broken[0, 1 if pooling == "each" else 0].all() and broken.sum() == 3


def test_offsets_beyond_32_bits() -> None:
    """A cache and bounds of more than 2³¹ numbers, of which only the far end is written."""
    blocks, kv_heads, head_dim = 2**31 // (8 * 128) + 64, 8, 128
    lower = torch.empty(blocks, kv_heads, 1, head_dim, dtype=torch.float8_e5m2, device="cuda")
    cache = torch.empty(blocks, 1, kv_heads, head_dim, dtype=torch.float8_e5m2, device="cuda")
    upper = torch.empty_like(lower)
    last = torch.randn(16, 1, kv_heads, head_dim, device="cuda").to(torch.float8_e5m2)
    cache[-16:] = last
    table = torch.arange(blocks - 16, blocks, device="cuda", dtype=torch.int32)[None]
    one = torch.ones(kv_heads, device="cuda")
    kv = KVView(cache, cache, Rows(table, int32([0]), int32([16]), 16), one, one)
    update_page_bounds(lower, upper, kv, page=1, start=int32([0]), count=16, table=table, implementation="triton")
    for bounds in (lower, upper):
        assert torch.equal(bounds[-16:].float(), last.transpose(1, 2).float())
    q = torch.randn(1, 32, head_dim, device="cuda").bfloat16()
    scores = page_scores(q, lower, upper, int32([16]), page=1, pooling="max", table=table, implementation="triton")
    logical = last.transpose(1, 2)[:, :, 0].transpose(0, 1)[None]
    expect_scores(scores, q, logical, logical, [16], 1, "max")
