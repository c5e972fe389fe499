"""Caches of 8-bit floats on a CUDA device as vLLM has them: one factor a layer, in blocks, with their bounds behind."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from kernel_caches import LAYOUTS, int32, make_case, moved
from quantised import FP8, quantised
from test_attention_gpu import check_everything

from saccade.adapters.vllm.cache_dtype import bounds_bytes
from saccade.adapters.vllm.worker.page_bounds import BlockBounds
from saccade.kernels.dense_decode_scores.api import dense_decode_scores
from saccade.kernels.page_bounds.api import page_scores
from saccade.types import KVView, Pooling, Rows, Softmax

PAGE = 16


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("query", [torch.bfloat16, torch.float16])
def test_every_layout_against_loops(layout: str, query: torch.dtype) -> None:
    """Factors that are no powers of two, of odd rows; `expand` has given all heads the same memory."""
    plain = make_case(layout=layout, lengths=[131, 1, 65], kv_heads=2, group=3, head_dim=64, padding=7, loose=5)
    case = moved(quantised(plain, torch.tensor(0.013).expand(2), torch.tensor(3.7).expand(2), query))
    for pooling, unit, sets in zip(get_args(Pooling), (1, 16, 24), ("kv", "query", "all"), strict=True):
        check_everything(case, pooling, unit, sets)


def blocks_of(lengths: list[int], block: int, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache `[blocks, Hkv, block, 2 · d]` with room for bounds, NaN where no row's token is, and its table."""
    room = bounds_bytes(block, PAGE, kv_heads, head_dim, 1)
    content, blocks = kv_heads * block * 2 * head_dim, 2 + sum(-(-length // block) for length in lengths)
    storage = torch.full((blocks, content + room), 0x7F, dtype=torch.uint8, device="cuda").view(FP8)
    cache = storage[:, :content].unflatten(1, (kv_heads, block, 2 * head_dim))
    table = torch.full((len(lengths), max(lengths) // block + 2), 10**6, dtype=torch.int32)
    numbers = torch.randperm(blocks).tolist()
    for row, length in enumerate(lengths):
        for index in range(-(-length // block)):
            table[row, index] = number = numbers.pop()
            count = min(length - index * block, block)
            cache[number, :, :count] = torch.randn(kv_heads, count, 2 * head_dim, device="cuda").to(FP8)
    return cache, table


@pytest.mark.parametrize("pooling", get_args(Pooling))
@pytest.mark.parametrize("block", [16, 64])
def test_bounds_behind_blocks(block: int, pooling: Pooling) -> None:
    """They are numbers of the page, exactly, and no token's score is above its page's, but by rounding."""
    lengths, kv_heads, head_dim, group = [701, 65, 1], 4, 128, 4
    cache, table = blocks_of(lengths, block, kv_heads, head_dim)
    k, v = (part.transpose(1, 2) for part in cache.split(head_dim, dim=-1))
    seq_lens = int32(lengths, "cuda")
    rows = Rows(table.cuda(), torch.zeros_like(seq_lens), seq_lens, 702)
    scale = torch.tensor(0.013, device="cuda").expand(kv_heads)
    kv = KVView(k, v, rows, scale, scale)
    bounds = BlockBounds.behind(cache, block, head_dim, PAGE)
    bounds.update(kv, torch.zeros_like(seq_lens), 702)
    q = torch.randn(3, kv_heads * group, head_dim, device="cuda").bfloat16()
    scores = page_scores(
        q,
        bounds.lower,
        bounds.upper,
        seq_lens,
        page=PAGE,
        pooling=pooling,
        table=rows.page_table,
        pages=-(-702 // PAGE),
        k_scale=scale,
        implementation="triton",
    ).double()
    for row, length in enumerate(lengths):
        at = torch.arange(length)
        keys = k[table[row].long()[at // block], at % block].double() * scale.double()[:, None]
        assert bool(keys.isfinite().all())
        for number, own in enumerate(keys.split(PAGE)):
            token = number * PAGE
            place = int(table[row, token // block]), slice(None), token % block // PAGE
            for side, extreme in ((bounds.lower, own.amin(0)), (bounds.upper, own.amax(0))):
                assert torch.equal(side[place].double() * scale.double()[:, None], extreme)
            queries = q[row].double().unflatten(0, (kv_heads, group))
            if pooling == "mean":
                queries = queries.mean(1, keepdim=True)
            exact = torch.einsum("hgd,nhd->hgn", queries, own)
            # Twice as many products as numbers, each of at most the largest key, summed in float32.
            error = 2.0**-23 * (2 * head_dim + group + 2) * queries.abs().sum(-1) * own.abs().amax(0).amax(-1)[:, None]
            least = exact.amax(-1) - error
            least = least.amax(1) if pooling == "max" else least.flatten()
            assert bool((scores[row, :, number] >= least).all())


def test_a_graph_reads_the_scales_that_it_finds() -> None:
    """What a captured step was given are places: a factor that is written later counts."""
    lengths, kv_heads, head_dim = [701, 65], 4, 128
    cache, table = blocks_of(lengths, 16, kv_heads, head_dim)
    k, v = (part.transpose(1, 2) for part in cache.split(head_dim, dim=-1))
    seq_lens = int32(lengths, "cuda")
    rows = Rows(table.cuda(), torch.zeros_like(seq_lens), seq_lens, 702)
    k_scale, v_scale = torch.ones((), device="cuda"), torch.ones((), device="cuda")
    kv = KVView(k, v, rows, k_scale.expand(kv_heads), v_scale.expand(kv_heads))
    q = torch.randn(2, 16, head_dim, device="cuda").bfloat16()

    def step() -> torch.Tensor:
        return dense_decode_scores(q, kv, Softmax(head_dim**-0.5), implementation="triton")[0]

    before = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    k_scale.fill_(0.3)
    v_scale.fill_(0.013)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, step())
    assert not torch.equal(captured, before)
