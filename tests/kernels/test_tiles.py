"""Caches in the tiles of AMX, as vLLM's CPU backend keeps bfloat16 where the machine has it."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from attention_contract import choose, expect_hybrid
from columns import columns, expect_broken, expect_guarded, expect_updates, guarded
from kernel_caches import Case, int32
from kernel_checks import expect_attention, expect_dense, needs_the_library, refused, threads
from page_bounds_contract import bounds_of

from saccade.kernels._native import library as native
from saccade.kernels.chunk_keys.api import chunk_keys
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import KVView, Pooling, Softmax

pytestmark = needs_the_library
NATIVE = native.reads_tiles(32)
"""Machines without products of bfloat16 pairs read tiles by copying them: there the same is asked of that."""
IMPLEMENTATION = "native" if NATIVE else "auto"
PAGES = (32, 64, 96)


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


def tiles(page: int, **changes: object) -> Case:
    """Rows of several pages, the second against the grain of tiles, the third within one; NaN where no token is."""
    case = columns(page, torch.bfloat16, **changes)
    return replace(case, layout="tiles", kv=in_tiles(case.kv))


def test_in_rows() -> None:
    case = columns(64, torch.bfloat16)
    rows = in_tiles(case.kv).in_rows()
    for got, want in ((rows.k, case.kv.k), (rows.v, case.kv.v)):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert not rows.tiled and rows.in_rows() is rows
    # Else every step would copy the whole cache.
    assert not any(native.reads_tiles(*sizes) for sizes in ((512, 1), (48, 1), (64, 33)))


@pytest.mark.parametrize(
    ("page", "group", "head_dim"),
    [(32, 1, 32), (64, 2, 64), (96, 3, 96), (32, 4, 128), (64, 1, 256), (96, 7, 32), (32, 32, 32)],
)
def test_all_tokens(page: int, group: int, head_dim: int) -> None:
    case = tiles(page, group=group, head_dim=head_dim)
    for pooling in (None, *get_args(Pooling)):
        _, scores = expect_dense(case, pooling, IMPLEMENTATION)
        if pooling is not None and scores is not None:
            alone = decode_scores(case.q, case.kv, pooling=pooling, implementation=IMPLEMENTATION)
            assert not NATIVE or torch.equal(scores, alone)


@pytest.mark.parametrize(("page", "unit"), [(32, 1), (64, 3), (96, 16)])
def test_chosen_tokens_and_pages(page: int, unit: int) -> None:
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


def test_heads_that_differ_and_a_cap_and_sinks() -> None:
    case = tiles(32, kv_heads=4, group=5)
    case = replace(case, softmax=Softmax(0.3, torch.randn(20), 2.0))
    dense, scored = (True, False, True, True), (False, False, True, True)
    for pooling in get_args(Pooling):
        expect_hybrid(case, "query", 4, dense, IMPLEMENTATION, pooling=pooling, scored=scored, seed=7)


def test_two_threads() -> None:
    case = tiles(32, lengths=[2100, 7, 1200], kv_heads=1, group=2, head_dim=64)
    with threads(2):
        expect_dense(case, "mean", IMPLEMENTATION)


@pytest.mark.parametrize("width", [4, 8, 16, 0])
def test_bounds_are_those_of_the_keys(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In C on every machine, vectors of every width."""
    monkeypatch.setattr(native, "widest", width)
    monkeypatch.setattr(native, "reads_tiles", lambda *sizes: native.library() is not None)
    for page in PAGES:
        expect_updates(tiles(page, kv_heads=2, group=1), page)


def test_a_key_that_is_no_number_makes_bounds_that_are_none() -> None:
    for token in range(20):
        case = columns(32, torch.bfloat16, lengths=[20], padding=0, kv_heads=1, group=1)
        case.kv.k[case.kv.rows.page_table[0, 0], token, 0, 5] = torch.nan
        bounds = bounds_of(case, 16)
        bounds.update(in_tiles(case.kv), 16, [0], 20, IMPLEMENTATION)
        expect_broken(bounds, token // 16, 5)


def test_chunk_keys_are_those_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "reads_tiles", lambda *sizes: native.library() is not None)
    for page in PAGES:
        case = columns(page, torch.bfloat16)
        edges = int32([[0, 1, 9, 40, page + 140], [0, 5, 5, 30, 83], [0, 0, 1, 3, 3]])
        found = [chunk_keys((kv,), edges, longest=300, implementation="native") for kv in (case.kv, in_tiles(case.kv))]
        assert torch.equal(*found)


def test_what_the_library_cannot_take_is_named_and_read_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case, q = tiles(32), torch.randn(3, 6, 32)
    words = r"tiles, and q is torch\.float32" if NATIVE else "no products"
    refused(words, dense_decode_scores, q, case.kv, case.softmax, implementation="native")
    monkeypatch.setattr(native, "reads_tiles", lambda *sizes: False)
    words = "in tiles, and this machine has no products of bfloat16 pairs"
    refused(words, dense_decode_scores, case.q, case.kv, case.softmax, implementation="native")
    expect_dense(case, None, "auto")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_nothing_is_read_behind_the_storage() -> None:
    case = tiles(32, lengths=[64], padding=0)
    memory, behind = guarded(case.kv.k.shape[0] * 2 * 2 * 32 * 32, torch.bfloat16)
    halves = memory.fill_(1.0).view(-1, 2, 2, 32, 32).permute(2, 0, 3, 1, 4)
    kv = replace(case.kv, k=halves[0], v=halves[1])
    last = replace(kv, rows=replace(kv.rows, page_table=kv.rows.page_table.clamp(max=0) + kv.k.shape[0] - 1))
    selection = choose(case, "all", 1, 1, 1)[0]
    everyone = replace(selection, ids=int32([[[1, 31, 33, 63]]]), counts=int32([[4]]))

    def read() -> None:
        dense_decode_scores(case.q, last, Softmax(0.3), implementation=IMPLEMENTATION)
        sparse_decode(case.q, last, everyone, Softmax(0.3), implementation=IMPLEMENTATION)

    expect_guarded(behind, read)
