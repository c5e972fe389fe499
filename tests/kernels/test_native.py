"""The C implementation: every vector width, threads, forks, and inputs that would lead it out of bounds."""

import os
import shutil
import signal
import threading
from dataclasses import replace

import pytest
import torch
from attention_contract import choose
from kernel_caches import Case, make_case
from kernel_checks import (
    WIDTHS,
    built,
    every_width,
    expect_attention,
    expect_dense,
    expect_scores,
    needs_the_library,
    refused,
    threads,
)
from page_bounds_contract import NOWHERE, bounds_of, filled
from torch import Tensor

from saccade.kernels._native import library as native
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.hybrid_decode.api import hybrid_decode
from saccade.kernels.page_bounds.api import page_scores
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import Pooling, Selection, Softmax

POOLINGS: tuple[Pooling, ...] = ("max", "mean", "each")


@pytest.fixture(params=WIDTHS, ids="native{}".format)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of at most this many floats; a narrower machine repeats its widest."""
    monkeypatch.setattr(native, "widest", request.param)


def test_the_library_is_built_where_there_is_a_compiler() -> None:
    if os.name == "posix" and any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        assert built
        assert native.description().startswith("native (")
    else:
        assert native.description() == ("torch" if native.library() is None else native.description())


@every_width
def test_exp(lanes: int) -> None:
    """Two units of float32 down to the smallest normal number, 0 below, 1 at 0."""
    library = native.library()
    assert library is not None
    numbers = torch.cat((-torch.rand(100_000) * 87.3, torch.linspace(-1.0, 0.0, 4000)))
    special = torch.tensor([0.0, -0.0, -torch.inf, -88.0, -1e30, -3e38, 1e-7, *[0.0] * 9])
    got = torch.cat((numbers, special))
    library.saccade_exp(got.data_ptr(), got.numel(), lanes)
    exact = numbers.double().exp()
    assert ((got[: numbers.numel()].double() - exact).abs() / exact).max() <= 2 * 2.0**-23
    assert got[numbers.numel() :].tolist()[:6] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert abs(got[numbers.numel() + 6].item() - 1.0) <= 2.0**-22


@needs_the_library
@pytest.mark.parametrize(
    ("layout", "group", "head_dim", "width"),
    [("paged", 7, 64, 8), ("paged", 7, 64, 32), ("buffer", 16, 128, 4), ("paged", 32, 128, 16), ("columns", 32, 64, 8)],
    indirect=["width"],
)
@pytest.mark.usefixtures("width")
def test_large_groups_are_done_in_parts(layout: str, group: int, head_dim: int) -> None:
    """Rows of several blocks, of which the next ones are fetched for the first queries alone."""
    case = make_case(layout=layout, lengths=[200, 9], kv_heads=1, group=group, head_dim=head_dim, dtype=torch.bfloat16)
    alone, _ = expect_dense(case, None, "native")
    for pooling in POOLINGS:
        assert torch.equal(expect_dense(case, pooling, "native")[0], alone)


def large(seed: int = 0) -> Case:
    return make_case(layout="buffer", lengths=[9000], kv_heads=1, group=2, head_dim=64, seed=seed)


def attend(case: Case) -> Tensor:
    return dense_decode_scores(case.q, case.kv, case.softmax, implementation="native")[0]


@needs_the_library
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_makes_its_own_threads() -> None:
    case = large()
    with threads(2):
        wanted = attend(case)
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(60)  # a deadlock ends the child, not the test run
                os._exit(0 if torch.equal(attend(case), wanted) else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert torch.equal(attend(case), wanted)


@needs_the_library
def test_callers_at_the_same_time() -> None:
    """The pool serves one caller at a time; the others work alone, and nobody gets another's numbers."""
    own = [large(seed) for seed in range(3)]
    wrong: list[int] = []

    def repeat(index: int, wanted: Tensor) -> None:
        torch.set_num_threads(2)
        wrong.extend(index for _ in range(300) if not torch.equal(attend(own[index]), wanted))

    with threads(2):
        wanted = [attend(case) for case in own]
        callers = [threading.Thread(target=repeat, args=pair) for pair in enumerate(wanted)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert wrong == []


@needs_the_library
def test_many_tiny_calls() -> None:
    case = make_case(layout="buffer", lengths=[1, 3], kv_heads=2, group=2, head_dim=16)
    wanted, _ = expect_dense(case, None, "native")
    for _ in range(3000):
        assert torch.equal(attend(case), wanted)


@needs_the_library
@pytest.mark.usefixtures("width")
@pytest.mark.parametrize(
    ("layout", "dtype", "group", "width"),
    [
        ("buffer", torch.float32, 1, 4),
        ("buffer", torch.bfloat16, 8, 8),
        ("buffer", torch.bfloat16, 8, 32),
        ("columns", torch.float32, 3, 8),
        ("columns", torch.bfloat16, 1, 16),
    ],
    indirect=["width"],
)
def test_bfloat16_queries_give_what_wide_ones_give_rounded(layout: str, dtype: torch.dtype, group: int) -> None:
    """Bit by bit, whatever the cache holds; half precision, which the library does not know, goes through float32."""
    case = make_case(layout=layout, lengths=[37, 1, 90], kv_heads=2, group=group, head_dim=64, dtype=dtype, padding=7)
    selection, _ = choose(case, "kv", 4, 3, 1)
    lower = torch.randn(3, 2, 9, 64).to(dtype)
    lengths = case.kv.rows.seq_lens
    for short in (torch.bfloat16, torch.float16):
        # As heads of a wider tensor: not contiguous.
        q = torch.stack((case.q, case.q), dim=2).to(short)[:, :, 0]

        def both(q: Tensor) -> list[Tensor | None]:
            kv = case.kv
            mixed = hybrid_decode(q, kv, selection, (True, False), Softmax(0.3), pooling="max", implementation="native")
            each = dense_decode_scores(q, kv, Softmax(0.3), pooling="each", implementation="native")
            sparse = sparse_decode(q, kv, selection, Softmax(0.3), implementation="native")
            alone = decode_scores(q, kv, pooling="mean", implementation="native")
            bounds = {"page": 16, "implementation": "native"}
            pages = [page_scores(q, lower, lower + 1, lengths, pooling=pooling, **bounds)[0] for pooling in POOLINGS]
            return [*mixed, *each, sparse, alone, *pages]

        for short_result, wide in zip(both(q), both(q.float()), strict=True):
            assert short_result is not None and wide is not None
            expected = wide.to(short) if short_result.dtype == short else wide
            assert torch.equal(short_result.nan_to_num(7), expected.nan_to_num(7))


@needs_the_library
def test_queries_that_are_no_bfloat16_numbers_lose_nothing() -> None:
    """One among others that are, on a cache that is."""
    case = make_case(lengths=[37], kv_heads=1, group=5, head_dim=64, dtype=torch.bfloat16)
    queries = case.q.float()
    queries[0, 3] *= 1 + 2.0**-11
    scores = decode_scores(queries, case.kv, pooling="each", implementation="native")
    expect_scores(scores, replace(case, q=queries), "each")


@needs_the_library
def test_outputs_are_rounded_to_the_nearest_and_to_even() -> None:
    numbers = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20]
    case = make_case(lengths=[1], kv_heads=1, group=1)
    case.kv.v.copy_(torch.tensor(numbers * 4).expand_as(case.kv.v))
    only = Selection(torch.zeros(1, 1, 1, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32))
    out = sparse_decode(case.q.bfloat16(), case.kv, only, case.softmax, implementation="native")
    assert out[0, 0, :4].tolist() == [1.0, 1 + 2**-6, -1.0, 1 + 2**-7]


@needs_the_library
def test_some_of_the_heads() -> None:
    """A narrowed view is what a layer of mixed roles passes."""
    case = make_case(layout="buffer", lengths=[37, 12], kv_heads=3, group=2, head_dim=64, dtype=torch.bfloat16)
    q, kv = case.q[:, 2:], case.kv.heads(1, 3)
    out, scores = dense_decode_scores(q, kv, Softmax(0.3), pooling="each", implementation="native")
    whole, whole_scores = dense_decode_scores(case.q, case.kv, case.softmax, pooling="each", implementation="native")
    assert scores is not None and whole_scores is not None
    assert torch.equal(out, whole[:, 2:])
    assert torch.equal(scores, whole_scores[:, 2:])


@needs_the_library
@pytest.mark.parametrize("unit", [1, 4])
def test_entries_that_are_no_tokens_are_skipped(unit: int) -> None:
    case = make_case(layout="paged", lengths=[9], kv_heads=1, group=2, head_dim=16, padding=7)
    ids = torch.tensor([[[-1, 0, 1, 10**6, 2**31 - 1]]], dtype=torch.int32)
    entries = Selection(ids, torch.tensor([[9]], dtype=torch.int32), unit)
    out = sparse_decode(case.q, case.kv, entries, case.softmax, implementation="native")
    expect_attention(out, case, [[list(range(2 * unit))] * 2])


@needs_the_library
@pytest.mark.parametrize("layout", ["paged", "buffer", "columns"])
def test_rows_and_blocks_that_lie_outside_their_memory_are_refused(layout: str) -> None:
    case = make_case(layout=layout, lengths=[40, 9], kv_heads=1, group=1, page=16)
    rows, blocks = case.kv.rows, filled(bounds_of(case, 4, 2), case, 4)
    held, table = blocks.lower.clone(), blocks.table
    assert table is not None
    for changes, words in (
        ({"seq_lens": rows.seq_lens + 1000}, "does not lie within its pages"),
        ({"seq_lens": rows.seq_lens * 0}, "does not lie within its pages"),
        ({"row_start": rows.row_start - 1}, "does not lie within its pages"),
        ({"page_table": rows.page_table + 10**6}, "outside the storage"),
        ({"page_table": rows.page_table - 10**6}, "outside the storage"),
        ({"max_len": 8}, "longer than max_len"),
    ):
        kv = replace(case.kv, rows=replace(rows, **changes))
        refused(words, dense_decode_scores, case.q, kv, case.softmax, pooling="max", implementation="native")
        if changes.get("seq_lens") is None or changes["seq_lens"].any():
            some = table[:, :1] if "max_len" in changes else table
            refused(words, replace(blocks, table=some).update, kv, 4, [0, 0], 2000, "native")
    for entry in (-1, blocks.lower.shape[0], NOWHERE):
        table[0, 4] = entry
        refused("outside the storage", blocks.update, case.kv, 4, [0, 0], 2000, "native")
        refused("page lies outside the storage", blocks.scores, case, 4, "native")
    assert torch.equal(blocks.lower.nan_to_num(7.0), held.nan_to_num(7.0))


def test_without_a_library_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(lengths=[9])
    monkeypatch.setattr(native, "library", lambda: None)
    assert native.description() == "torch"
    refused("no library", decode_scores, case.q, case.kv, pooling="max", implementation="native")
    expect_dense(case, None, "auto")


@needs_the_library
def test_a_query_that_is_not_contiguous() -> None:
    case = make_case(layout="buffer", lengths=[37], kv_heads=2, group=3, head_dim=32)
    apart = torch.stack((case.q, case.q + 1), dim=-1)[..., 0]
    assert not apart.is_contiguous()
    out, _ = dense_decode_scores(apart, case.kv, case.softmax, implementation="native")
    wanted, _ = dense_decode_scores(case.q, case.kv, case.softmax, implementation="reference")
    torch.testing.assert_close(out, wanted)
