"""Page bounds on a CUDA device: bfloat16 and fp8 against float64, where vLLM keeps them, and inside a CUDA graph."""

from dataclasses import replace
from functools import partial
from typing import Any, get_args

import kernel_caches
import pytest
import torch
from device_caches import blocks_of, captured
from kernel_caches import Case, make_case, moved
from page_bounds_contract import Bounds, bounds_of, expect_page_scores, expect_update, filled
from quantised import FP8, expect_bound_scores, quantised
from torch import Tensor

from saccade.adapters.vllm.worker.page_bounds import BlockBounds
from saccade.kernels.page_bounds.api import page_scores, update_page_bounds
from saccade.types import KVView, Pooling, Rows

PAGE = 16
poolings = get_args(Pooling)
int32 = partial(kernel_caches.int32, device="cuda")


def told(kv: KVView, q: Tensor, keys: list[Tensor]) -> Case:
    """The case of such a cache, whose rows have these keys `[T, Hkv, d]`."""
    numbers = [[*row.double().cpu().transpose(0, 1).numpy()] for row in keys]
    return Case("blocks", [len(row) for row in keys], kv, q, numbers, numbers)


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
    case = moved(make_case(lengths=lengths, group=group, head_dim=head_dim, dtype=dtype))
    bounds = filled(bounds_of(case, PAGE), case, PAGE)
    scores, again = (bounds.scores(case, PAGE, how, pooling=pooling) for how in ("triton", "auto"))
    expect_page_scores(scores, case, PAGE, bounds.lower.shape[2], pooling)
    for row, length in enumerate(lengths):
        assert torch.equal(scores[row, :, : -(-length // PAGE)], again[row, :, : -(-length // PAGE)])


@pytest.mark.parametrize("pooling", poolings)
def test_queries_of_another_type(pooling: Pooling) -> None:
    """What bfloat16 cannot hold does not pass through it."""
    case = moved(make_case(lengths=[800, 77], group=4, head_dim=64, dtype=torch.bfloat16))
    bounds = filled(bounds_of(case, PAGE), case, PAGE)
    for dtype in (torch.float32, torch.float16):
        asked = replace(case, q=torch.randn(2, 8, 64, device="cuda").to(dtype))
        scores = bounds.scores(asked, PAGE, "triton", pooling=pooling)
        expect_page_scores(scores, asked, PAGE, bounds.lower.shape[2], pooling)


@pytest.mark.parametrize("pooling", poolings)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_scores_against_float64(dtype: torch.dtype, pooling: Pooling) -> None:
    scale = torch.tensor([0.25, 1.0, 2.0, 0.5])
    plain = make_case(lengths=[520, 99], kv_heads=4, group=4, head_dim=128)
    expect_bound_scores(moved(quantised(plain, scale, scale, torch.bfloat16, dtype)), PAGE, pooling, "triton")


@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize("layout", ["buffer", "paged", "interleaved", "strided"])
def test_updates_are_exact(layout: str, page: int) -> None:
    """Only the touched pages are written, whatever lies between tokens."""
    sizes = {"lengths": [150, 33, 97], "group": 1, "head_dim": 80, "padding": 7}
    case = moved(make_case(layout=layout, **sizes, dtype=torch.bfloat16))
    expect_update(case, bounds_of(case, page), page, [20, 0, 200], 40, "triton")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_updates_are_exact(dtype: torch.dtype) -> None:
    case = make_case(layout="paged", lengths=[150, 33], kv_heads=2, group=1, head_dim=64, padding=1)
    one = torch.ones(2)
    case = moved(quantised(case, one, one, torch.bfloat16, dtype))
    expect_update(case, bounds_of(case, PAGE), PAGE, [0, 0], 150, "triton")


@pytest.mark.parametrize(("dtype", "block"), [(torch.bfloat16, 64), (FP8, 16), (FP8, 64)])
def test_bounds_behind_blocks_of_a_serving_engine(dtype: torch.dtype, block: int) -> None:
    """In the padding of its pages, through its block table; all other memory stays as it is.

    Of 8 bits they are numbers of the page, and one factor is told for all heads.
    """
    lengths, kv_heads, head_dim = [701, 65, 1], 4, 128
    cache, table = blocks_of(lengths, block, kv_heads, head_dim, dtype)
    k, v = (part.transpose(1, 2) for part in cache.split(head_dim, dim=-1))
    rows = Rows(table.cuda(), int32([0, 0, 0]), int32(lengths), 702)
    scale = torch.tensor(0.013, device="cuda").expand(kv_heads) if dtype == FP8 else None
    kv = KVView(k, v, rows, scale, scale)
    behind = BlockBounds.behind(cache, block, head_dim, PAGE)
    before = cache.float()
    behind.update(kv, torch.zeros_like(rows.seq_lens), 702)
    torch.testing.assert_close(cache.float(), before, rtol=0, atol=0, equal_nan=True)
    factor = 1.0 if scale is None else scale.double()[:, None]
    keys = []
    for row, length in enumerate(lengths):
        at = torch.arange(length)
        keys.append(k[table[row].long()[at // block], at % block].double() * factor)
        assert bool(keys[-1].isfinite().all())
        for number, own in enumerate(keys[-1].split(PAGE)):
            place = int(table[row, number * PAGE // block]), slice(None), number * PAGE % block // PAGE
            for side, extreme in ((behind.lower, own.amin(0)), (behind.upper, own.amax(0))):
                assert torch.equal(side[place].double() * factor, extreme)
    written = sum(-(-length // PAGE) for length in lengths) * kv_heads * head_dim
    assert all(int((~side.float().isnan()).sum()) == written for side in (behind.lower, behind.upper))
    room = cache.as_strided((len(cache), cache.stride(0)), (cache.stride(0), 1))[:, kv_heads * block * 2 * head_dim :]
    assert int((~room.float().isnan()).sum()) == 2 * written
    case = told(kv, torch.randn(3, 4 * kv_heads, head_dim, device="cuda").bfloat16(), keys)
    bounds, pages = Bounds(behind.lower, behind.upper, rows.page_table), -(-702 // PAGE)
    for pooling in poolings:
        scores = bounds.scores(case, PAGE, "triton", pooling=pooling, pages=pages, k_scale=scale)
        expect_page_scores(scores, case, PAGE, pages, pooling)


@pytest.mark.parametrize(("rows", "dtype"), [(2, torch.bfloat16), (40, torch.bfloat16), (2, FP8)])
def test_a_search_bounds_pages_as_rows_fill_them(rows: int, dtype: torch.dtype) -> None:
    """Replayed token by token, in launches that begin early and in others: pages are bounded as their update does."""
    kv_heads, head_dim, first, last = 2, 128, 1000, 1040
    cache = torch.randn(rows, last, kv_heads, head_dim, device="cuda").to(dtype)
    seq_lens = int32([first + 7 * row % 16 for row in range(rows)])
    kv = KVView(cache, cache, Rows(torch.arange(rows, device="cuda").int()[:, None], seq_lens * 0, seq_lens, last))
    lower, upper = torch.zeros((2, rows, kv_heads, -(-last // PAGE), head_dim), dtype=dtype, device="cuda")
    wanted = torch.zeros_like(lower), torch.zeros_like(upper)
    options: Any = {"page": PAGE, "implementation": "triton"}
    for sides in ((lower, upper), wanted):
        update_page_bounds(*sides, kv, start=seq_lens * 0, count=last, filled=True, **options)
    q = torch.randn(rows, 4 * kv_heads, head_dim, device="cuda").bfloat16()
    known = {"pooling": "max", "k_scale": torch.ones(1, device="cuda") if dtype == FP8 else None, **options}
    graph, (scores, tiles) = captured(lambda: page_scores(q, lower, upper, seq_lens, filling=kv, **known))
    for _ in range(24):
        seq_lens += 1
        graph.replay()
        told, _ = page_scores(q, *wanted, seq_lens, **known)
        update_page_bounds(*wanted, kv, start=seq_lens - 1, count=1, filled=True, **options)
        assert torch.equal(lower.float(), wanted[0].float()) and torch.equal(upper.float(), wanted[1].float())
        for row, full in enumerate(((seq_lens - 1) // PAGE).tolist()):
            assert torch.equal(scores[row, :, :full], told[row, :, :full])
            assert tiles is not None and torch.equal(tiles[row, :, 0], told[row, :, :32].amax(1))


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
        return page_scores(q, lower, upper, seq_lens, page=PAGE, pooling=pooling, implementation="triton")[0]

    for row, length in enumerate(lengths):
        cache[row, :, :length] = keys[row, :, :length]
    step(capacity)
    graph, scores = captured(lambda: step(2))
    held = lengths
    for now in ([102, 33], [104, 35], [112, 48], [113, 49], [113, 50], [115, 52]):
        for row, (before, length) in enumerate(zip(held, now, strict=True)):
            cache[row, :, before:length] = keys[row, :, before:length]
        seq_lens.copy_(int32(now))
        start.copy_(int32([length - 2 for length in now]))
        q.copy_(torch.randn_like(q))
        graph.replay()
        seen = [keys[row, :, :length].transpose(0, 1) for row, length in enumerate(now)]
        expect_page_scores(scores, told(kv, q, seen), PAGE, pages, pooling)
        held = now
    seq_lens.copy_(int32([1, 0]))
    start.copy_(int32([5, 5]))
    graph.replay()
    assert scores[0, :, 0].isfinite().all()


def test_a_query_that_is_no_number_does_not_pass_for_one() -> None:
    case = moved(make_case(lengths=[40], group=4, head_dim=64, dtype=torch.bfloat16))
    bounds = filled(bounds_of(case, PAGE), case, PAGE)
    case.q[0, 1, 3] = torch.nan
    for pooling in poolings:
        broken = bounds.scores(case, PAGE, "triton", pooling=pooling, pages=3).isnan()
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
    scores, _ = page_scores(q, lower, upper, int32([16]), page=1, pooling="max", table=table, implementation="triton")
    expect_page_scores(scores, told(kv, q, [last[:, 0]]), 1, scores.shape[2], "max")
