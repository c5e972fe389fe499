"""Keys that lie as columns, as vLLM's CPU backend keeps them: neighbouring tokens next to each other in every page."""

import os
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from attention_contract import expect_sparse
from columns import columns, expect_broken, expect_guarded, expect_updates, guarded
from kernel_caches import int32, make_case
from kernel_checks import expect_dense, needs_the_library, refused
from page_bounds_contract import Bounds, bounds_of

from saccade.kernels._native import library as native
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.page_bounds.api import update_page_bounds
from saccade.types import KVView, Pooling, Rows, Softmax

pytestmark = needs_the_library
DTYPES = (torch.float32, torch.bfloat16)
LANES = (4, 8, 16)
# Both types and every width of vectors, and for each a page that it does not divide or that is longer.
every_way = pytest.mark.parametrize(
    ("page", "dtype", "lanes"),
    [
        (5, torch.bfloat16, 4),
        (48, torch.float32, 8),
        (16, torch.bfloat16, 16),
        (128, torch.float32, 16),
    ],
)


@every_way
def test_all_tokens(page: int, dtype: torch.dtype, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "widest", lanes)
    case = columns(page, dtype)
    for pooling in (None, *get_args(Pooling)):
        _, scores = expect_dense(case, pooling, "native")
        if pooling is not None and scores is not None:
            assert torch.equal(scores, decode_scores(case.q, case.kv, pooling=pooling, implementation="native"))


@every_way
def test_chosen_tokens_and_pages(page: int, dtype: torch.dtype, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "widest", lanes)
    case = columns(page, dtype)
    for sets, unit in (("all", 1), ("kv", 3), ("query", 16), ("kv", 1), ("query", 3)):
        expect_sparse(case, sets, unit, 3, page + unit, "native")


@pytest.mark.parametrize(("dtype", "lanes"), [(torch.float32, 4), (torch.bfloat16, 8), (torch.float32, 16)])
def test_a_row_may_be_one_page(dtype: torch.dtype, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a size that no vector divides, so that its last tokens are read together with some before them."""
    monkeypatch.setattr(native, "widest", lanes)
    case = columns(173, dtype, lengths=[166, 31])
    assert case.kv.rows.page_table.shape[1] == 2
    out, _ = expect_dense(case, "max", "native")
    one = replace(case.kv, rows=replace(case.kv.rows, page_table=case.kv.rows.page_table[:, :1]))
    assert torch.equal(dense_decode_scores(case.q, one, Softmax(0.3), implementation="native")[0], out)


@pytest.mark.parametrize("group", [7, 32])
def test_large_groups_are_done_in_parts(group: int) -> None:
    case = columns(32, torch.bfloat16, lengths=[70, 9], kv_heads=1, group=group, head_dim=64)
    for pooling in get_args(Pooling):
        expect_dense(case, pooling, "native")


@every_way
def test_bounds_are_those_of_the_keys(
    page: int, dtype: torch.dtype, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "widest", lanes)
    expect_updates(columns(page, dtype, kv_heads=1, group=1), page)


@pytest.mark.parametrize(
    ("layout", "dtype", "lanes"),
    [
        ("paged", torch.bfloat16, 16),
        ("columns", torch.float32, 4),
        ("columns", torch.bfloat16, 8),
        ("columns", torch.float32, 16),
    ],
)
def test_a_key_that_is_no_number_makes_bounds_that_are_none(
    layout: str, dtype: torch.dtype, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As amin and amax have it, wherever it stands; and infinities are numbers."""
    monkeypatch.setattr(native, "widest", lanes)
    for token in range(20):
        case = make_case(layout=layout, lengths=[20], kv_heads=1, group=1, page=16, dtype=dtype)
        k, table = case.kv.k, case.kv.rows.page_table[0]
        k[table[token // 16], token % 16, 0, 5] = torch.nan
        k[table[0], :, 0, 6], k[table[0], :, 0, 7] = torch.inf, -torch.inf
        bounds = bounds_of(case, 16)
        bounds.update(case.kv, 16, [0], 20, "native")
        expect_broken(bounds, token // 16, 5)
        assert all(side[0, 0, 0, 6:8].tolist() == [torch.inf, -torch.inf] for side in (bounds.lower, bounds.upper))


@pytest.mark.parametrize("layout", ["paged", "columns"])
def test_rows_and_blocks_that_lie_outside_their_memory_are_refused(layout: str) -> None:
    case = make_case(layout=layout, lengths=[40, 9], kv_heads=1, group=1, page=16)
    blocks, rows = bounds_of(case, 4, 2), case.kv.rows
    table = blocks.table
    assert table is not None
    for changed, places, words in (
        (replace(rows, seq_lens=rows.seq_lens + 1000), table, "does not lie within its pages"),
        (replace(rows, row_start=rows.row_start - 1), table, "does not lie within its pages"),
        (replace(rows, page_table=rows.page_table + 10**6), table, "outside the storage"),
        (replace(rows, page_table=rows.page_table - 10**6), table, "outside the storage"),
        (rows, table + 10**6, "outside the storage"),
        (rows, table - 10**6, "outside the storage"),
        (replace(rows, max_len=8), table[:, :1], "longer than max_len"),
    ):
        named = replace(blocks, table=places)
        refused(words, named.update, replace(case.kv, rows=changed), 4, [0, 0], 2000, "native")
    assert blocks.lower.isnan().all()


def test_what_the_library_cannot_take_is_named() -> None:
    """Pages narrower than any vector, values as columns; and bounds as columns."""
    narrow, wide = columns(3, lengths=[9, 4]), columns(16, lengths=[9, 4])
    turned = replace(wide, kv=replace(wide.kv, v=wide.kv.v.transpose(1, 3).contiguous().transpose(1, 3)))
    bounds = bounds_of(wide, 4)
    for case in (narrow, turned):
        refused("strides", dense_decode_scores, case.q, case.kv, case.softmax, implementation="native")
        refused("strides", bounds.update, case.kv, 4, [0, 0], 9, "native")
        expect_dense(case, None, "auto")
    bad = Bounds(bounds.lower.transpose(2, 3).contiguous().transpose(2, 3), bounds.upper)
    refused("bounds have strides", bad.update, wide.kv, 4, [0, 0], 9, "native")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a wrong read would end the tests")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("page", [5, 16, 17, 33, 48])
def test_nothing_is_read_behind_the_storage(page: int) -> None:
    """The memory behind the last page's last key belongs to nobody."""
    heads, dim = 2, 32
    for dtype in DTYPES:
        k, behind = guarded(3 * heads * dim * page, dtype)
        k = k.view(3, heads, dim, page).permute(0, 3, 1, 2)
        k.copy_(torch.randn(k.shape))
        rows = Rows.on_host(int32([0, 1, 2])[None], [0], [3 * page])
        kv = KVView(k, torch.randn(3, page, heads, dim).to(dtype), rows)
        q, bounds = torch.randn(1, heads, dim).to(dtype), torch.empty(2, 1, heads, page, dim, dtype=dtype)
        how: Any = {"page": 3, "start": int32([0]), "count": 3 * page, "implementation": "native"}

        def read(kv: KVView = kv, q: torch.Tensor = q, bounds: torch.Tensor = bounds, how: Any = how) -> None:
            for native.widest in LANES:
                dense_decode_scores(q, kv, Softmax(0.3), implementation="native")
                update_page_bounds(*bounds, kv, **how)

        expect_guarded(behind, read)
