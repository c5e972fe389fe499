"""Keys that lie as columns, as vLLM's CPU backend keeps them: neighbouring tokens next to each other in every page."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from kernel_caches import COLUMN_PAGES, Case, int32, make_case
from kernel_checks import expect_dense, fast_attention, threads
from test_hybrid_decode import check
from test_page_bounds import expect_update, poisoned
from test_paged_bounds import expect_update as expect_paged_update
from test_paged_bounds import scattered
from test_sparse_decode import expect_sparse

from saccade.errors import KernelError
from saccade.kernels._native import library as native
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.page_bounds.api import update_page_bounds
from saccade.types import KVView, Pooling, Rows, Softmax

pytestmark = pytest.mark.skipif("native" not in fast_attention, reason="no library was built")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=[4, 8, 16])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Vectors of at most this many floats; a narrower machine repeats its widest."""
    monkeypatch.setattr(native, "widest", request.param)
    return int(request.param)


def columns(page: int, dtype: torch.dtype = torch.float32, **changes: object) -> Case:
    """Rows of several pages, the second against the grain of page and vector, the third within one vector."""
    sizes: dict[str, object] = {"lengths": [page + 150, 83, 3], "kv_heads": 2, "group": 3, "head_dim": 32, "padding": 7}
    return make_case(layout="columns", page=page, dtype=dtype, **(sizes | changes))  # type: ignore[arg-type] # as above


def test_the_layout_is_what_it_says() -> None:
    k, v = columns(32).kv.k, columns(32).kv.v
    assert (k.stride(1), k.stride(3)) == (1, 32)
    assert (v.stride(1), v.stride(3)) == (32, 1)
    assert k.stride(0) > 2 * 2 * 32 * 32
    assert torch.isnan(k).any()


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", COLUMN_PAGES)
def test_all_tokens(page: int, dtype: torch.dtype) -> None:
    case = columns(page, dtype)
    for pooling in (None, *get_args(Pooling)):
        _, scores = expect_dense(case, pooling, "native")
        if pooling is not None and scores is not None:
            assert torch.equal(scores, decode_scores(case.q, case.kv, pooling=pooling, implementation="native"))


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", COLUMN_PAGES)
@pytest.mark.parametrize("unit", [1, 3, 16])
def test_chosen_tokens_and_pages(unit: int, page: int, dtype: torch.dtype) -> None:
    case = columns(page, dtype)
    for sets in ("all", "kv", "query"):
        expect_sparse(case, sets, unit, 3, page + unit, "native")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [16, 48])
def test_heads_that_differ(page: int, dtype: torch.dtype) -> None:
    case = columns(page, dtype, kv_heads=4, group=5)
    for pooling in get_args(Pooling):
        check(case, "native", "query", 4, (True, False, True, True), pooling, (False, False, True, True), page)


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_may_be_one_page(dtype: torch.dtype) -> None:
    """Of a size that no vector divides, so that its last tokens are read together with some before them."""
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


def test_two_threads() -> None:
    """Spans begin anywhere in a group of tokens; the cut depends on the number of threads alone."""
    case = columns(32, lengths=[2100, 7, 1200], kv_heads=1, group=2, head_dim=64)
    alone, _ = dense_decode_scores(case.q, case.kv, case.softmax, implementation="native")
    with threads(2):
        out, _ = expect_dense(case, "mean", "native")
        again, _ = dense_decode_scores(case.q, case.kv, case.softmax, pooling="mean", implementation="native")
        expect_sparse(case, "kv", 1, 5, 3, "native")
    assert torch.equal(out, again)
    assert not torch.equal(out, alone)  # else nothing was cut


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit", [1, 16, 40])
def test_bounds_are_those_of_the_keys(unit: int, dtype: torch.dtype) -> None:
    """In one block per row, and in scattered blocks; also past the end of rows, where nothing is touched."""
    for page in COLUMN_PAGES:
        case = columns(page, dtype, kv_heads=1, group=1)
        for starts, count in (([0, 0, 0], 500), ([page + 140, 80, 0], 5), ([16, 83, 10**6], 17)):
            expect_update(case, unit, starts, count, "native")
            for per_block in (1, 3):
                expect_paged_update(case, scattered(case, unit, per_block), unit, starts, count, "native")


@pytest.mark.parametrize("layout", ["paged", "columns"])
def test_bounds_by_two_threads(layout: str) -> None:
    case = make_case(layout=layout, lengths=[2600, 700], kv_heads=4, group=1, head_dim=64, page=32)
    with threads(2):
        expect_update(case, 16, [0, 300], 2600, "native")


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["paged", "columns"])
def test_a_key_that_is_no_number_makes_bounds_that_are_none(layout: str, dtype: torch.dtype) -> None:
    """As amin and amax have it, wherever it stands; and infinities are numbers."""
    for token in range(20):
        case = make_case(layout=layout, lengths=[20], kv_heads=1, group=1, head_dim=16, page=16, dtype=dtype)
        kv = case.kv
        kv.k[kv.rows.page_table[0, token // 16], token % 16, 0, 5] = torch.nan
        kv.k[kv.rows.page_table[0, 0], :, 0, 6] = torch.inf
        kv.k[kv.rows.page_table[0, 0], :, 0, 7] = -torch.inf
        lower, upper = poisoned(case, 16)
        update_page_bounds(lower, upper, kv, page=16, start=int32([0]), count=20, implementation="native")
        for bounds in (lower, upper):
            nan = bounds[0, 0, :2].isnan()
            assert nan.sum() == 1 and nan[token // 16, 5]
            assert bounds[0, 0, 0, 6:8].tolist() == [torch.inf, -torch.inf]


@pytest.mark.parametrize("layout", ["paged", "columns"])
def test_rows_and_blocks_that_lie_outside_their_memory_are_refused(layout: str) -> None:
    case = make_case(layout=layout, lengths=[40, 9], kv_heads=1, group=1, head_dim=16, page=16)
    blocks = scattered(case, 4, 2)
    rows, table = case.kv.rows, blocks.table
    wrong = [
        (replace(rows, seq_lens=rows.seq_lens + 1000), table, "does not lie within its pages"),
        (replace(rows, row_start=rows.row_start - 1), table, "does not lie within its pages"),
        (replace(rows, page_table=rows.page_table + 10**6), table, "outside the storage"),
        (replace(rows, page_table=rows.page_table - 10**6), table, "outside the storage"),
        (rows, table + 10**6, "outside the storage"),
        (rows, table - 10**6, "outside the storage"),
        (replace(rows, max_len=8), table[:, :1], "longer than max_len"),
    ]
    for changed, places, words in wrong:
        given: Any = {"page": 4, "start": int32([0, 0]), "count": 2000, "table": places}
        kv = replace(case.kv, rows=changed)
        with pytest.raises(KernelError, match=words):
            update_page_bounds(blocks.lower, blocks.upper, kv, **given, implementation="native")
    assert blocks.lower.isnan().all()


def test_what_the_library_cannot_take_is_named() -> None:
    """Pages narrower than any vector, values as columns; and bounds as columns."""
    narrow = columns(3, lengths=[9, 4])
    wide = columns(16, lengths=[9, 4])
    turned = replace(wide, kv=replace(wide.kv, v=wide.kv.v.transpose(1, 3).contiguous().transpose(1, 3)))
    lower, upper = poisoned(wide, 4)
    start = int32([0, 0])
    for case in (narrow, turned):
        with pytest.raises(KernelError, match="strides"):
            dense_decode_scores(case.q, case.kv, case.softmax, implementation="native")
        with pytest.raises(KernelError, match="strides"):
            update_page_bounds(lower, upper, case.kv, page=4, start=start, count=9, implementation="native")
        expect_dense(case, None, "auto")
    bad = lower.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(KernelError, match="bounds have strides"):
        update_page_bounds(bad, upper, wide.kv, page=4, start=start, count=9, implementation="native")


def guarded(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Numbers at the end of a page of memory, and the address of the next."""
    edge, size = mmap.PAGESIZE, count * dtype.itemsize
    memory = mmap.mmap(-1, -(-size // edge) * edge + edge)
    numbers = torch.frombuffer(memory, dtype=dtype, count=count, offset=len(memory) - edge - size)
    return numbers, numbers.data_ptr() + size


def expect_guarded(behind: int, read: Callable[[], None]) -> None:
    """`read` reads nothing from that address on: it ends well where the memory belongs to nobody."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            # Here only: the tests' own process keeps its memory.
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), mmap.PAGESIZE, 0) == 0
            read()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a wrong read would end the tests")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [*COLUMN_PAGES, 17, 33])
def test_nothing_is_read_behind_the_storage(page: int, dtype: torch.dtype) -> None:
    """The memory behind the last page's last key belongs to nobody."""
    heads, dim = 2, 32
    k, behind = guarded(3 * heads * dim * page, dtype)
    k = k.view(3, heads, dim, page).permute(0, 3, 1, 2)
    k.copy_(torch.randn(k.shape))
    kv = KVView(k, torch.randn(3, page, heads, dim).to(dtype), Rows.on_host(int32([0, 1, 2])[None], [0], [3 * page]))
    q = torch.randn(1, heads, dim).to(dtype)
    bounds = torch.empty(2, 1, heads, page, dim, dtype=dtype)

    def read() -> None:
        for native.widest in (4, 8, 16):
            dense_decode_scores(q, kv, Softmax(0.3), implementation="native")
            update_page_bounds(*bounds, kv, page=3, start=int32([0]), count=3 * page, implementation="native")

    expect_guarded(behind, read)
