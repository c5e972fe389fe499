"""Caches as vLLM's CPU backend keeps them: keys as columns in every page, or bfloat16 in the tiles of AMX."""

import ctypes
import mmap
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from attention_contract import choose, expect_hybrid, expect_sparse
from kernel_caches import Case, int32, make_case
from kernel_checks import expect_attention, expect_dense, needs_the_library, refused, threads
from page_bounds_contract import bounds_of, expect_update

from saccade.kernels._native import library as native
from saccade.kernels.chunk_keys.api import chunk_keys
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.page_bounds.api import update_page_bounds
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import KVView, Pooling, Rows, Softmax

pytestmark = needs_the_library
NATIVE = native.reads_tiles(32)
"""Machines without products of bfloat16 pairs read tiles by copying them: there the same is asked of that."""
IMPLEMENTATION = "native" if NATIVE else "auto"
PAGES = (32, 64, 96)


def columns(page: int, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Case:
    """Rows of several pages, the second against the grain of page and vector, the third within one vector."""
    sizes: dict[str, Any] = {"lengths": [page + 150, 83, 3], "group": 3, "head_dim": 32, "padding": 7, **changes}
    return make_case(layout="columns", page=page, dtype=dtype, **sizes)


def in_tiles(kv: KVView) -> KVView:
    """The same numbers where AMX's kernels expect them, one by one; NaN between the pages."""
    pages, page, heads, dim = kv.k.shape
    token, number = torch.arange(page)[:, None], torch.arange(dim)
    keys = (token // 16 * (dim // 2) + number // 2) * 32 + token % 16 * 2 + number % 2
    values = (number // 16 * (page // 2) + token // 2) * 32 + number % 16 * 2 + token % 2
    memory = torch.full((pages, heads, 2 * page * dim + 32), torch.nan, dtype=kv.k.dtype)
    memory[:, :, keys] = kv.k.transpose(1, 2)
    memory[:, :, page * dim + values] = kv.v.transpose(1, 2)
    k, v = (memory[:, :, at : at + page * dim].unflatten(2, (page, dim)).transpose(1, 2) for at in (0, page * dim))
    return replace(kv, k=k, v=v, tiled=True)


def tiles(page: int, **changes: Any) -> Case:
    case = columns(page, **changes)
    return replace(case, layout="tiles", kv=in_tiles(case.kv))


def expect_updates(case: Case, page: int) -> None:
    """In one block per row, and in scattered blocks; also past the end of rows, where nothing is touched."""
    for starts, count in (([0, 0, 0], 500), ([page + 140, 80, 0], 5), ([16, 83, 10**6], 17)):
        for unit, per_block in ((1, None), (16, None), (40, None), (1, 3), (16, 1), (40, 3)):
            expect_update(case, bounds_of(case, unit, per_block), unit, starts, count, "native")


# Both types and every width of vectors, and for each a page that it does not divide or that is longer.
@pytest.mark.parametrize(
    ("page", "dtype", "lanes"),
    [(5, torch.bfloat16, 4), (48, torch.float32, 8), (16, torch.bfloat16, 16), (128, torch.float32, 16)],
)
def test_columns(page: int, dtype: torch.dtype, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer rows than the contracts draw."""
    monkeypatch.setattr(native, "widest", lanes)
    case = columns(page, dtype)
    for pooling in get_args(Pooling):
        expect_dense(case, pooling, "native")
    for sets, unit in (("all", 1), ("kv", 3), ("query", 16), ("kv", 1), ("query", 3)):
        expect_sparse(case, sets, unit, 3, page + unit, "native")
    expect_updates(columns(page, dtype, kv_heads=1, group=1), page)


def test_in_rows() -> None:
    case = columns(64)
    rows = in_tiles(case.kv).in_rows()
    for got, want in ((rows.k, case.kv.k), (rows.v, case.kv.v)):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert not rows.tiled and rows.in_rows() is rows
    # Else every step would copy the whole cache.
    assert not any(native.reads_tiles(*sizes) for sizes in ((512, 1), (48, 1), (64, 33)))


@pytest.mark.parametrize(("dtype", "lanes"), [(torch.float32, 4), (torch.bfloat16, 8), (torch.float32, 16)])
def test_a_row_may_be_one_page(dtype: torch.dtype, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a size that no vector divides, so that its last tokens are read together with some before them."""
    monkeypatch.setattr(native, "widest", lanes)
    case = columns(173, dtype, lengths=[166, 31])
    assert case.kv.rows.page_table.shape[1] == 2
    out, _ = expect_dense(case, "max", "native")
    one = replace(case.kv, rows=replace(case.kv.rows, page_table=case.kv.rows.page_table[:, :1]))
    assert torch.equal(dense_decode_scores(case.q, one, Softmax(0.3), implementation="native")[0], out)


@pytest.mark.parametrize(
    ("page", "group", "head_dim"),
    [(32, 1, 32), (64, 2, 64), (96, 3, 96), (32, 4, 128), (64, 1, 256), (96, 7, 32), (32, 32, 32)],
)
def test_all_tokens_in_tiles(page: int, group: int, head_dim: int) -> None:
    case = tiles(page, group=group, head_dim=head_dim)
    for pooling in get_args(Pooling):
        _, scores = expect_dense(case, pooling, IMPLEMENTATION)
        alone = decode_scores(case.q, case.kv, pooling=pooling, implementation=IMPLEMENTATION)
        assert not NATIVE or (scores is not None and torch.equal(scores, alone))


@pytest.mark.parametrize(("page", "unit"), [(32, 1), (64, 3), (96, 16)])
def test_chosen_tokens_in_tiles(page: int, unit: int) -> None:
    case = tiles(page)  # of tokens that share a line some are chosen; the other may be NaN
    for sets in ("all", "kv", "query"):
        selection, tokens = choose(case, sets, unit, 3, page + unit)
        kv = case.kv
        if sets == "all":
            kept, table = torch.zeros(kv.k.shape[:3], dtype=torch.bool), kv.rows.page_table.long()
            for row, heads in enumerate(tokens):
                # What reads a copy in torch reads a row's ends for what a set lacks, and weighs it by 0.
                ends = [] if NATIVE else [0, int(kv.rows.seq_lens[row]) - 1]
                slots = int(kv.rows.row_start[row]) + torch.tensor([*heads[0], *ends])
                kept[table[row, slots // page], slots % page] = True
            rows = kv.in_rows()
            k, v = (part.masked_fill(~kept[..., None], torch.nan) for part in (rows.k, rows.v))
            kv = in_tiles(replace(rows, k=k, v=v))
        out = sparse_decode(case.q, kv, selection, Softmax(0.3), implementation=IMPLEMENTATION)
        expect_attention(out, case, tokens)


def test_tiles_of_heads_that_differ_a_cap_and_sinks_and_by_two_threads() -> None:
    case = tiles(32, kv_heads=4, group=5)
    case = replace(case, softmax=Softmax(0.3, torch.randn(20), 2.0))
    dense, scored = (True, False, True, True), (False, False, True, True)
    for pooling in get_args(Pooling):
        expect_hybrid(case, "query", 4, dense, IMPLEMENTATION, pooling=pooling, scored=scored, seed=7)
    with threads(2):
        expect_dense(tiles(32, lengths=[2100, 7, 1200], kv_heads=1, head_dim=64), "mean", IMPLEMENTATION)


@pytest.mark.parametrize("width", [4, 8, 16, 0])
def test_bounds_of_tiles(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In C on every machine, vectors of every width."""
    monkeypatch.setattr(native, "widest", width)
    monkeypatch.setattr(native, "reads_tiles", lambda *sizes: native.library() is not None)
    for page in PAGES:
        expect_updates(tiles(page, group=1), page)


@pytest.mark.parametrize(
    ("layout", "dtype", "lanes"),
    [
        ("paged", torch.bfloat16, 16),
        ("columns", torch.float32, 4),
        ("columns", torch.bfloat16, 8),
        ("columns", torch.float32, 16),
        ("tiles", torch.bfloat16, 0),
    ],
)
def test_a_key_that_is_no_number_makes_bounds_that_are_none(
    layout: str, dtype: torch.dtype, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As amin and amax have it, wherever it stands; and infinities are numbers."""
    monkeypatch.setattr(native, "widest", lanes)
    tiled = layout == "tiles"
    for token in range(20):
        held = {"layout": "columns" if tiled else layout, "page": 32 if tiled else 16, "head_dim": 32}
        case = make_case(lengths=[20], kv_heads=1, group=1, dtype=dtype, **held)
        k, page = case.kv.k, held["page"]
        k[case.kv.rows.page_table[0, token // page], token % page, 0, 5] = torch.nan
        k[case.kv.rows.page_table[0, 0], :, 0, 6:8] = torch.tensor([torch.inf, -torch.inf], dtype=dtype)
        bounds, kv = bounds_of(case, 16), in_tiles(case.kv) if tiled else case.kv
        bounds.update(kv, 16, [0], 20, IMPLEMENTATION if tiled else "native")
        for side in (bounds.lower, bounds.upper):
            nan = side[0, 0, :2].isnan()
            assert nan.sum() == 1 and nan[token // 16, 5]
            assert side[0, 0, 0, 6:8].tolist() == [torch.inf, -torch.inf]


def test_chunk_keys_of_tiles_are_those_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "reads_tiles", lambda *sizes: native.library() is not None)
    for page in PAGES:
        case = columns(page)
        edges = int32([[0, 1, 9, 40, page + 140], [0, 5, 5, 30, 83], [0, 0, 1, 3, 3]])
        found = [chunk_keys((kv,), edges, longest=300, implementation="native") for kv in (case.kv, in_tiles(case.kv))]
        assert torch.equal(*found)


def test_tiles_that_the_library_cannot_take_are_read_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case, q = tiles(32), torch.randn(3, 6, 32)
    words = r"tiles, and q is torch\.float32" if NATIVE else "no products"
    refused(words, dense_decode_scores, q, case.kv, case.softmax, implementation="native")
    monkeypatch.setattr(native, "reads_tiles", lambda *sizes: False)
    words = "in tiles, and this machine has no products of bfloat16 pairs"
    refused(words, dense_decode_scores, case.q, case.kv, case.softmax, implementation="native")
    expect_dense(case, None, "auto")


def guarded(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Numbers at the end of a page of memory, and the address of the next."""
    edge, size = mmap.PAGESIZE, count * dtype.itemsize
    memory = mmap.mmap(-1, -(-size // edge) * edge + edge)
    numbers = torch.frombuffer(memory, dtype=dtype, count=count, offset=len(memory) - edge - size)
    return numbers, numbers.data_ptr() + size


def expect_guarded(behind: int, read: Callable[[], object]) -> None:
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


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("page", [5, 16, 17, 33, 48])
def test_nothing_is_read_behind_columns(page: int) -> None:
    """The memory behind the last page's last key belongs to nobody."""
    heads, dim = 2, 32
    for dtype in (torch.float32, torch.bfloat16):
        k, behind = guarded(3 * heads * dim * page, dtype)
        k = k.view(3, heads, dim, page).permute(0, 3, 1, 2)
        k.copy_(torch.randn(k.shape))
        rows = Rows.on_host(int32([0, 1, 2])[None], [0], [3 * page])
        kv = KVView(k, torch.randn(3, page, heads, dim).to(dtype), rows)
        q, bounds = torch.randn(1, heads, dim).to(dtype), torch.empty(2, 1, heads, page, dim, dtype=dtype)
        how: Any = {"page": 3, "start": int32([0]), "count": 3 * page, "implementation": "native"}

        def read(kv: KVView = kv, q: torch.Tensor = q, bounds: torch.Tensor = bounds, how: Any = how) -> None:
            for native.widest in (4, 8, 16):
                dense_decode_scores(q, kv, Softmax(0.3), implementation="native")
                update_page_bounds(*bounds, kv, **how)

        expect_guarded(behind, read)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_nothing_is_read_behind_tiles() -> None:
    case = tiles(32, lengths=[64], padding=0)
    memory, behind = guarded(case.kv.k.shape[0] * 2 * 2 * 32 * 32, torch.bfloat16)
    halves = memory.fill_(1.0).view(-1, 2, 2, 32, 32).permute(2, 0, 3, 1, 4)
    kv = replace(case.kv, k=halves[0], v=halves[1])
    last = replace(kv, rows=replace(kv.rows, page_table=kv.rows.page_table.clamp(max=0) + kv.k.shape[0] - 1))
    everyone = replace(choose(case, "all", 1, 1, 1)[0], ids=int32([[[1, 31, 33, 63]]]), counts=int32([[4]]))
    given: Any = {"softmax": Softmax(0.3), "implementation": IMPLEMENTATION}
    expect_guarded(
        behind, lambda: (dense_decode_scores(case.q, last, **given), sparse_decode(case.q, last, everyone, **given))
    )
