"""The C implementation: every vector width, threads, forks, and inputs that would lead it out of bounds."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_caches import Case, cases, make_case
from kernel_checks import expect_attention, expect_dense, expect_scores, poolings, takes
from kernel_checks import threads as threads_of
from test_sparse_decode import choose, expect_sparse
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._native import library as native
from saccade.kernels._native.attention import native_refusal
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.hybrid_decode.api import hybrid_decode
from saccade.kernels.page_bounds.api import page_scores
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import Pooling, Selection, Softmax

# Without a library there is nothing to run here but the one test that says there should be one.
built = native.library() is not None
WIDTHS = (4, 8, 16, 32) if built else ()
POOLINGS: tuple[Pooling, ...] = ("max", "mean", "each")
fitting = cases(dtypes=(torch.float32, torch.bfloat16), head_dims=(16, 32, 64, 80, 96, 128)).filter(
    lambda case: takes("native", case)
)


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Vectors of at most this many floats; a narrower machine repeats its widest."""
    monkeypatch.setattr(native, "widest", request.param)
    return int(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    """Two threads for one test."""
    with threads_of(2):
        yield


def test_the_library_is_built_where_there_is_a_compiler() -> None:
    if os.name == "posix" and any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        assert built
        assert native.description().startswith("native (")
    else:
        assert native.description() == ("torch" if native.library() is None else native.description())


if built:

    @pytest.mark.parametrize("lanes", WIDTHS)
    @given(case=fitting, pooling=st.one_of(st.none(), poolings))
    def test_dense_of_every_width(lanes: int, case: Case, pooling: Pooling | None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "widest", lanes)
            expect_dense(case, pooling, "native")
            if pooling is not None:
                alone = decode_scores(case.q, case.kv, pooling=pooling, implementation="native")
                expect_scores(alone, case, pooling)

    @pytest.mark.parametrize("lanes", WIDTHS)
    @given(
        case=fitting,
        sets=st.sampled_from(("all", "kv", "query")),
        unit=st.sampled_from((1, 4, 16)),
        seed=st.integers(0, 2**31),
    )
    def test_sparse_of_every_width(
        lanes: int, case: Case, sets: Literal["all", "kv", "query"], unit: int, seed: int
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "widest", lanes)
            expect_sparse(case, sets, unit, 3, seed, "native")


@pytest.mark.parametrize("lanes", WIDTHS)
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


@pytest.mark.parametrize(("layout", "head_dim"), [("paged", 64), ("buffer", 128)])
@pytest.mark.parametrize("group", [7, 16, 32] if built else [])
def test_large_groups_are_done_in_parts(width: int, group: int, layout: str, head_dim: int) -> None:
    """Rows of several blocks, of which the next ones are fetched for the first queries alone."""
    sizes = {"lengths": [200, 9], "kv_heads": 1, "group": group, "head_dim": head_dim}
    case = make_case(layout=layout, **sizes, dtype=torch.bfloat16)
    alone, _ = expect_dense(case, None, "native")
    for pooling in POOLINGS:
        assert torch.equal(expect_dense(case, pooling, "native")[0], alone)


@pytest.mark.parametrize("layout", ["buffer", "paged"] if built else [])
@pytest.mark.usefixtures("threads")
def test_two_threads(layout: str) -> None:
    """Enough bytes that the work is cut into spans, rows so ragged that some are one span and others many."""
    case = make_case(layout=layout, lengths=[2100, 7, 1200], kv_heads=1, group=2, head_dim=64, padding=7)
    out, _ = expect_dense(case, "mean", "native")
    for pooling in ("max", "mean", "each"):
        # The cut depends on the number of threads alone, not on who was faster.
        again, scores = dense_decode_scores(case.q, case.kv, case.softmax, pooling=pooling, implementation="native")
        assert torch.equal(out, again)
        assert scores is not None
        assert torch.equal(scores, decode_scores(case.q, case.kv, pooling=pooling, implementation="native"))
    torch.set_num_threads(1)
    alone, _ = dense_decode_scores(case.q, case.kv, case.softmax, implementation="native")
    torch.set_num_threads(2)
    assert not torch.equal(out, alone)  # else nothing was cut
    for unit in (1, 16):
        expect_sparse(case, "kv", unit, 5, 3, "native")


def large(seed: int = 0) -> Case:
    return make_case(layout="buffer", lengths=[9000], kv_heads=1, group=2, head_dim=64, seed=seed)


@pytest.mark.parametrize("rounds", [20] if built else [])
@pytest.mark.usefixtures("threads")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_makes_its_own_threads(rounds: int) -> None:
    case = large()
    wanted, _ = dense_decode_scores(case.q, case.kv, case.softmax, implementation="native")
    for _ in range(rounds):
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a deadlock ends the child, not the test run
            out, _ = dense_decode_scores(case.q, case.kv, case.softmax, implementation="native")
            os._exit(0 if torch.equal(out, wanted) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(dense_decode_scores(case.q, case.kv, case.softmax, implementation="native")[0], wanted)


@pytest.mark.parametrize("calls", [300] if built else [])
@pytest.mark.usefixtures("threads")
def test_callers_at_the_same_time(calls: int) -> None:
    """The pool serves one caller at a time; the others work alone, and nobody gets another's numbers."""
    own = [large(seed) for seed in range(3)]
    wanted = [dense_decode_scores(case.q, case.kv, case.softmax, implementation="native")[0] for case in own]
    wrong: list[int] = []

    def repeat(index: int) -> None:
        torch.set_num_threads(2)
        for _ in range(calls):
            out, _ = dense_decode_scores(own[index].q, own[index].kv, own[index].softmax, implementation="native")
            if not torch.equal(out, wanted[index]):
                wrong.append(index)

    callers = [threading.Thread(target=repeat, args=(index,)) for index in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@pytest.mark.parametrize("calls", [3000] if built else [])
def test_many_tiny_calls(calls: int) -> None:
    case = make_case(layout="buffer", lengths=[1, 3], kv_heads=2, group=2, head_dim=16)
    wanted, _ = expect_dense(case, None, "native")
    for _ in range(calls):
        assert torch.equal(dense_decode_scores(case.q, case.kv, case.softmax, implementation="native")[0], wanted)


@pytest.mark.parametrize("scale", [0.0, -0.3, 0.3] if built else [])
def test_any_scale_and_a_query_that_is_not_contiguous(width: int, scale: float) -> None:
    case = make_case(layout="buffer", lengths=[37], kv_heads=2, group=3, head_dim=32)
    apart = torch.stack((case.q, case.q + 1), dim=-1)[..., 0]
    assert not apart.is_contiguous()
    out, _ = dense_decode_scores(apart, case.kv, Softmax(scale), implementation="native")
    wanted, _ = dense_decode_scores(case.q, case.kv, Softmax(scale), implementation="reference")
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("layout", ["buffer", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 8] if built else [])
def test_bfloat16_queries_give_what_wide_ones_give_rounded(
    width: int, group: int, dtype: torch.dtype, layout: str
) -> None:
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
            pages = [page_scores(q, lower, lower + 1, lengths, pooling=pooling, **bounds) for pooling in POOLINGS]
            return [*mixed, *each, sparse, alone, *pages]

        for short_result, wide in zip(both(q), both(q.float()), strict=True):
            assert short_result is not None and wide is not None
            expected = wide.to(short) if short_result.dtype == short else wide
            assert torch.equal(short_result.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("numbers", [[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20]] if built else [])
def test_outputs_are_rounded_to_the_nearest_and_to_even(numbers: list[float]) -> None:
    case = make_case(layout="buffer", lengths=[1], kv_heads=1, group=1, head_dim=16)
    case.kv.v.copy_(torch.tensor(numbers * 4).expand_as(case.kv.v))
    only = Selection(torch.zeros(1, 1, 1, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32))
    out = sparse_decode(case.q.bfloat16(), case.kv, only, case.softmax, implementation="native")
    assert out[0, 0, :4].tolist() == [1.0, 1 + 2**-6, -1.0, 1 + 2**-7]


@pytest.mark.parametrize("heads", [(1, 3)] if built else [])
def test_some_of_the_heads(heads: tuple[int, int]) -> None:
    """A narrowed view is what a layer of mixed roles passes."""
    case = make_case(layout="buffer", lengths=[37, 12], kv_heads=3, group=2, head_dim=64, dtype=torch.bfloat16)
    q, kv = case.q[:, heads[0] * 2 : heads[1] * 2], case.kv.heads(*heads)
    out, scores = dense_decode_scores(q, kv, Softmax(0.3), pooling="each", implementation="native")
    whole, whole_scores = dense_decode_scores(case.q, case.kv, case.softmax, pooling="each", implementation="native")
    assert scores is not None and whole_scores is not None
    assert torch.equal(out, whole[:, heads[0] * 2 : heads[1] * 2])
    assert torch.equal(scores, whole_scores[:, heads[0] * 2 : heads[1] * 2])


@pytest.mark.parametrize("unit", [1, 4] if built else [])
def test_entries_that_are_no_tokens_are_skipped(unit: int) -> None:
    case = make_case(layout="paged", lengths=[9], kv_heads=1, group=2, head_dim=16, padding=7)
    ids = torch.tensor([[[-1, 0, 1, 10**6, 2**31 - 1]]], dtype=torch.int32)
    entries = Selection(ids, torch.tensor([[9]], dtype=torch.int32), unit)
    out = sparse_decode(case.q, case.kv, entries, case.softmax, implementation="native")
    expect_attention(out, case, [[list(range(2 * unit))] * 2])


def broken(case: Case, **changes: object) -> Case:
    return replace(case, kv=replace(case.kv, rows=replace(case.kv.rows, **changes)))


@pytest.mark.parametrize("layout", ["paged", "buffer"] if built else [])
def test_rows_that_lie_outside_their_memory_are_refused(layout: str) -> None:
    case = make_case(layout=layout, lengths=[9, 4], kv_heads=2, group=2, head_dim=16)
    rows = case.kv.rows
    wrong = [
        (broken(case, seq_lens=rows.seq_lens + 1000), "pages"),
        (broken(case, seq_lens=rows.seq_lens * 0), "pages"),
        (broken(case, row_start=rows.row_start - 1), "pages"),
        (broken(case, page_table=rows.page_table + 10**6), "outside"),
        (broken(case, page_table=rows.page_table - 10**6), "outside"),
        (broken(case, max_len=8), "max_len"),
    ]
    for call, words in wrong:
        with pytest.raises(KernelError, match=words):
            dense_decode_scores(call.q, call.kv, call.softmax, pooling="max", implementation="native")


def test_what_the_library_cannot_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(layout="buffer", lengths=[9], kv_heads=2, group=2, head_dim=24)
    half = make_case(layout="buffer", lengths=[9], kv_heads=2, group=2, head_dim=16, dtype=torch.float16)
    many = make_case(layout="buffer", lengths=[9], kv_heads=1, group=33, head_dim=16)
    strided = make_case(layout="strided", lengths=[9], kv_heads=2, group=2, head_dim=16)
    good = make_case(layout="buffer", lengths=[9], kv_heads=2, group=2, head_dim=16)
    if built:
        for other, words in ((case, "head dim 24"), (half, "float16"), (many, "33 query heads"), (strided, "strides")):
            with pytest.raises(KernelError, match=words):
                dense_decode_scores(other.q, other.kv, other.softmax, implementation="native")
            assert native_refusal(other.q, other.kv) is not None
            expect_dense(other, None, "auto")
    monkeypatch.setattr(native, "library", lambda: None)
    assert native.description() == "torch"
    with pytest.raises(KernelError, match="no library"):
        decode_scores(good.q, good.kv, pooling="max", implementation="native")
    expect_dense(good, None, "auto")
