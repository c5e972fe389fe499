"""Caches on a CUDA device: rows of many thousand tokens, with float64 beside them, and blocks as vLLM has them."""

from collections.abc import Callable
from typing import TypeVar

import torch
from attention_contract import expect_everything
from kernel_budgets import UNIT
from kernel_caches import Case, int32
from torch import Tensor

from saccade.adapters.vllm.cache_dtype import bounds_bytes
from saccade.types import KVView, Pooling, Rows, Selection

Results = TypeVar("Results")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KV_HEADS, GROUP, DIM = 4, 4, 128
PAGE = 16
SCALE = DIM**-0.5


def captured(step: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """A graph of the step, and what its replays write to; kernels are compiled before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def check_everything(case: Case, pooling: Pooling, unit: int, sets: str) -> None:
    """All operations on a case, against float64 loops."""
    expect_everything(case, "triton", sets, unit, pooling, tuple(head % 2 == 0 for head in range(case.kv.kv_heads)))


def long_cache(lengths: list[int], page: int | None, max_len: int, seed: int) -> tuple[KVView, Tensor, Tensor]:
    """A cache of random numbers with NaN wherever no row's token lies; keys and values `[B, Hkv, max_len, d]`."""
    chance = torch.Generator("cuda").manual_seed(seed)
    batch = len(lengths)
    k, v = (torch.randn((batch, KV_HEADS, max_len, DIM), generator=chance, device="cuda").bfloat16() for _ in range(2))
    seq_lens = int32(lengths, "cuda")
    absent = torch.arange(max_len, device="cuda") >= seq_lens[:, None]
    k_nan, v_nan = (part.masked_fill(absent[:, None, :, None], torch.nan) for part in (k, v))
    zeros = torch.zeros_like(seq_lens)
    if page is None:
        table = torch.arange(batch, dtype=torch.int32, device="cuda")[:, None]
        kv = KVView(k_nan.transpose(1, 2), v_nan.transpose(1, 2), Rows(table, zeros, seq_lens, max_len))
        return kv, k, v
    count = max_len // page
    order = torch.randperm(batch * count, generator=chance, device="cuda")
    table = order.int().view(batch, count)

    def paged(tokens: Tensor) -> Tensor:
        pages = torch.empty((batch * count, page, KV_HEADS, DIM), dtype=tokens.dtype, device="cuda")
        pages[order] = tokens.transpose(1, 2).reshape(batch * count, page, KV_HEADS, DIM)
        return pages

    return KVView(paged(k_nan), paged(v_nan), Rows(table, zeros, seq_lens, max_len)), k, v


def expect_close(out: Tensor, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> None:
    """Attention to the positions marked in `chosen` `[B, Hkv, N]`, against float64.

    A weight, a sum and the result are each rounded to the dtype once; float32 adds less than 1e-3.
    """
    for row in range(q.shape[0]):
        for head in range(KV_HEADS):
            at = chosen[row, head].nonzero()[:, 0]
            keys, values = k[row, head, at].double(), v[row, head, at].double()
            own = slice(head * GROUP, (head + 1) * GROUP)
            masses = torch.softmax(q[row, own].double() @ keys.T * SCALE, dim=-1)
            bound = (3.2 * UNIT[q.dtype] + 1e-3) * (masses @ values.abs())
            assert bool(((out[row, own].double() - masses @ values).abs() <= bound).all())


def expect_long_scores(scores: Tensor, q: Tensor, k: Tensor, lengths: list[int]) -> None:
    for row, length in enumerate(lengths):
        grouped = q[row].view(KV_HEADS, GROUP, DIM).double()
        keys = k[row, :, :length].double()
        wanted = (grouped @ keys.transpose(1, 2)).amax(dim=1)
        size = (grouped.abs() @ keys.abs().transpose(1, 2)).amax(dim=1)
        assert bool(((scores[row, :, :length].double() - wanted).abs() <= size * (DIM + 5) * 2.0**-23).all())


def marked(lengths: list[int], max_len: int) -> Tensor:
    seq_lens = torch.tensor(lengths, device="cuda")
    return (torch.arange(max_len, device="cuda") < seq_lens[:, None])[:, None].expand(-1, KV_HEADS, -1)


def random_sets(lengths: list[int], budget: int, unit: int, seed: int, max_len: int) -> tuple[Selection, Tensor]:
    """Sets per KV head in buffers wider than they are, and the positions they stand for."""
    chance = torch.Generator("cuda").manual_seed(seed)
    ids = torch.full((len(lengths), KV_HEADS, budget // unit + 5), -1, dtype=torch.int32, device="cuda")
    chosen = torch.zeros((len(lengths), KV_HEADS, max_len + unit), dtype=torch.bool, device="cuda")
    counts = torch.empty((len(lengths), KV_HEADS), dtype=torch.int32, device="cuda")
    for row, length in enumerate(lengths):
        units = -(-length // unit)
        for head in range(KV_HEADS):
            count = min(units, budget // unit)
            picked = torch.randperm(units, generator=chance, device="cuda")[:count].sort().values
            ids[row, head, :count] = picked.int()
            counts[row, head] = count
            tokens = (picked[:, None] * unit + torch.arange(unit, device="cuda")).flatten()
            chosen[row, head, tokens[tokens < length]] = True
    return Selection(ids, counts, unit), chosen[..., :max_len]


def blocks_of(
    lengths: list[int], block: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A cache `[blocks, Hkv, block, 2 · d]` with room for bounds, NaN where no row's token is, and its table."""
    room = bounds_bytes(block, PAGE, kv_heads, head_dim, dtype.itemsize) // dtype.itemsize
    content, blocks = kv_heads * block * 2 * head_dim, 2 + sum(-(-length // block) for length in lengths)
    storage = torch.full((blocks, content + room), torch.nan, device="cuda").to(dtype)
    cache = storage[:, :content].unflatten(1, (kv_heads, block, 2 * head_dim))
    table = torch.full((len(lengths), max(lengths) // block + 2), 10**6, dtype=torch.int32)
    numbers = torch.randperm(blocks).tolist()
    for row, length in enumerate(lengths):
        for index in range(-(-length // block)):
            table[row, index] = number = numbers.pop()
            count = min(length - index * block, block)
            cache[number, :, :count] = torch.randn(kv_heads, count, 2 * head_dim, device="cuda").to(dtype)
    return cache, table
