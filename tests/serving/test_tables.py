"""Rewritten block tables: a paged dense kernel that is given them attends to the chosen pages and to nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged import (
    LAYOUTS,
    SCALE,
    Sets,
    block_table,
    budget,
    empty_cache,
    every_token,
    expected,
    paged_attention,
    random_sets,
    rows_of,
    split,
    write,
)
from vllm import _custom_ops as vllm_kernels

from saccade.adapters.vllm.worker.block_tables import Layout, StepTables, Tables, refusal
from saccade.adapters.vllm.worker.cpu import SaccadeCPUAttention
from saccade.errors import ServingError
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import KVView

KV_HEADS, GROUP = 3, 2
QUERY_HEADS = KV_HEADS * GROUP


def check_fits(out: torch.Tensor, q: torch.Tensor, kv: KVView, sets: Sets) -> None:
    """Against loops over the set, in float64."""
    error = (out.double() - expected(q, kv, sets.tokens)).abs().max()
    assert error <= budget(q, kv, sets.tokens)


def tables_of(sets: Sets, kv: KVView) -> Tables:
    selection = sets.selection
    return StepTables(kv.rows, Layout.of(kv), selection.unit, selection.groups).of(selection)


def requests(q: torch.Tensor, kv: KVView, sets: Sets) -> tuple[Any, ...]:
    """The queries, pages and tables that a paged kernel is given."""
    layout = Layout.of(kv)
    tables = tables_of(sets, kv)
    count = tables.seq_lens.shape[0]
    k, v = (kv.k, kv.v) if count == q.shape[0] else (layout.one_head_pages(kv.k), layout.one_head_pages(kv.v))
    return q.view(count, -1, q.shape[2]), k, v, tables.blocks, tables.seq_lens


@pytest.mark.parametrize("groups", [1, KV_HEADS, QUERY_HEADS])
@pytest.mark.parametrize("multiple", [1, 2])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exactly_the_chosen_tokens_are_attended_to(layout: str, block: int, multiple: int, groups: int) -> None:
    """NaN is in every other slot, in the padding and in no result."""
    unit = multiple * block
    lengths = [5 * unit + 1, 1, 4 * unit, unit - 1, 3 * unit + block // 2]
    kv_cache = empty_cache(layout, 16 * multiple, KV_HEADS, block, 4)
    table = block_table(lengths, block, 16 * multiple, seed=block)
    kv = KVView(*split(kv_cache), rows_of(table, lengths))
    sets = random_sets(lengths, unit, groups, QUERY_HEADS, seed=unit + groups)
    write(kv, sets.tokens)
    q = torch.randn(len(lengths), QUERY_HEADS, 4)
    out = paged_attention(*requests(q, kv, sets)).view(q.shape)
    # Both are float64 loops over the same numbers; only the order of the queries differs.
    assert (out - expected(q, kv, sets.tokens)).abs().max() < 1e-12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_one_head_are_the_cache_itself(layout: str) -> None:
    kv_cache = empty_cache(layout, 5, KV_HEADS, 16, 8)
    kv_cache.copy_(torch.randn(kv_cache.shape))
    kv = KVView(*split(kv_cache), rows_of(torch.zeros(1, 1, dtype=torch.int32), [1]))
    layout_ = Layout.of(kv)
    pages = layout_.one_head_pages(kv.v)
    assert pages.shape[1:] == (16, 1, 8)
    assert pages.untyped_storage().data_ptr() == kv_cache.untyped_storage().data_ptr()
    for block in range(5):
        for head in range(KV_HEADS):
            page = pages[block * layout_.per_block + head * layout_.per_head]
            assert torch.equal(page[:, 0], kv.v[block, :, head])
    # The copy engine of newer GPUs takes strides of 16 bytes, and these caches' strides are multiples of 8 numbers.
    assert layout_.step % 8 == 0


def test_a_single_head_is_its_own_block_whatever_its_stride() -> None:
    kv_cache = torch.zeros(4, 1, 16, 8).as_strided((4, 1, 16, 8), (128, 7, 8, 1))
    kv = KVView(*split(kv_cache), rows_of(torch.zeros(1, 1, dtype=torch.int32), [1]))
    assert Layout.of(kv) == Layout(kv_heads=1, block=16, step=128, per_block=1, per_head=0)


def test_padding_names_blocks_of_the_row() -> None:
    """Kernels may fetch what lies behind a request's tokens before they know that it is not wanted."""
    lengths = [70, 33]
    kv_cache = empty_cache("NHD", 16, KV_HEADS, 16, 4)
    kv = KVView(*split(kv_cache), rows_of(block_table(lengths, 16, 16, seed=0), lengths))
    layout = Layout.of(kv)
    sets = random_sets(lengths, 32, KV_HEADS, QUERY_HEADS, seed=1, slack=5)
    tables = tables_of(sets, kv)
    assert tables.blocks.dtype == tables.seq_lens.dtype == torch.int32
    assert tables.blocks.shape == (2 * KV_HEADS, 2 * sets.selection.ids.shape[2])
    for row, length in enumerate(lengths):
        own = set(kv.rows.page_table[row, : -(-length // 16)].tolist())
        for head in range(KV_HEADS):
            numbers = tables.blocks[row * KV_HEADS + head] - head * layout.per_head
            assert {number / layout.per_block for number in numbers.tolist()} <= own


def test_units_that_no_table_can_express_are_refused() -> None:
    assert refusal(32, 16) is None
    assert refusal(16, 16) is None
    assert "single tokens" in (refusal(1, 16) or "")
    assert "pages of 16 tokens and a block table only whole blocks of 32" in (refusal(16, 32) or "")
    assert refusal(48, 32) is not None


def test_more_pages_than_a_table_can_name_are_refused() -> None:
    rows = rows_of(torch.zeros(1, 1, dtype=torch.int32), [1])

    def cache(stride: int) -> KVView:
        k = torch.empty_strided((2**20, 16, 2, 8), (stride, 16, 2**10, 1), device="meta")
        return KVView(k, k, rows)

    assert Layout.of(cache(2**20)).pages(2**20) < 2**31
    with pytest.raises(ServingError, match="gpu-memory-utilization"):
        Layout.of(cache(2**22))


def test_a_dense_table_is_a_set_of_everything() -> None:
    lengths = [70, 16, 1]
    kv = KVView(*split(empty_cache("NHD", 16, KV_HEADS, 16, 4)), rows_of(block_table(lengths, 16, 16, 3), lengths))
    tokens = every_token(lengths, QUERY_HEADS)
    write(kv, tokens)
    units = [-(-length // 16) for length in lengths]
    ids = torch.tensor([[list(range(count)) + [-1] * (5 - count)] for count in units], dtype=torch.int32)
    sets = Sets(type(random_sets([1], 16, 1, 1, 0).selection)(ids, torch.tensor(units).int()[:, None], 16), tokens)
    q = torch.randn(3, QUERY_HEADS, 4)
    check_fits(paged_attention(*requests(q, kv, sets)).view(q.shape), q, kv, sets)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("block", "multiple"), [(16, 1), (16, 2), (32, 1), (32, 2)])
@pytest.mark.parametrize("padded", [False, True])
def test_vllms_own_paged_kernel_agrees_with_our_operation(padded: bool, block: int, multiple: int, groups: int) -> None:
    """Its CPU kernel, over keys that lie `[d, block]`; each set is a request of its own."""
    unit, kv_heads, head_dim = multiple * block, 2, 64
    lengths = [6 * unit + 3, 2 * unit, 9]
    kv_cache = empty_cache("HND padded" if padded else "HND", 32, kv_heads, block, head_dim)
    rows = rows_of(block_table(lengths, block, 32, seed=5), lengths)
    kv = SaccadeCPUAttention.view(None, None, kv_cache, rows)  # type: ignore[arg-type]
    sets = random_sets(lengths, unit, groups, 2 * kv_heads, seed=groups)
    # This kernel weighs what lies behind a row's tokens in their block with zero, so that it must be numbers.
    whole = [
        [sorted({at // block * block + slot for at in own for slot in range(block)}) for own in row]
        for row in sets.tokens
    ]
    write(kv, whole)
    q = torch.randn(len(lengths), 2 * kv_heads, head_dim)
    out = vllm_attention(q, kv_cache, kv, sets, "vec16" if block == 16 else "vec")
    check_fits(out, q, kv, sets)
    check_fits(sparse_decode(q, kv, sets.selection, scale=SCALE), q, kv, sets)


def vllm_attention(q: torch.Tensor, kv_cache: torch.Tensor, kv: KVView, sets: Sets, isa: str) -> torch.Tensor:
    layout = Layout.of(kv)
    tables = tables_of(sets, kv)
    count = tables.seq_lens.shape[0]
    heads, block, head_dim = kv.kv_heads, kv.page, kv.head_dim
    if count > q.shape[0]:
        heads = 1
        sizes = (layout.pages(kv_cache.shape[0]), 1, 2 * block, head_dim)
        kv_cache = kv_cache.as_strided(sizes, (layout.step, layout.step, head_dim, 1))
    else:
        kv_cache = kv_cache.view(-1, heads, 2 * block, head_dim)
    key_cache, value_cache = kv_cache.chunk(2, dim=2)
    queries = q.reshape(count, -1, head_dim)
    out = torch.empty_like(queries)
    plan = vllm_kernels.cpu_attn_get_scheduler_metadata(
        num_reqs=count,
        num_heads=queries.shape[1],
        num_kv_heads=heads,
        head_dim=head_dim,
        seq_lens=tables.seq_lens,
        dtype=q.dtype,
        query_start_loc=tables.starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=False,
    )
    vllm_kernels.cpu_attention_with_kv_cache(
        query=queries,
        key_cache=key_cache,
        value_cache=value_cache,
        output=out,
        query_start_loc=tables.starts,
        seq_lens=tables.seq_lens,
        scale=SCALE,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=tables.blocks,
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
    )
    return out.view(q.shape)
