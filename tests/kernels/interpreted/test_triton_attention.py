"""Triton's decoding attention in the interpreter against float64 loops: all tokens, sets, both, and their scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_caches import Case, cases, int32, make_case
from kernel_checks import (
    everything,
    expect_attention,
    expect_dense,
    expect_other_rows,
    expect_scores,
    poolings,
    with_other_rows,
)
from quantised import expect_everything, quantised
from test_hybrid_decode import Flags, check, flags
from test_sparse_decode import choose, expect_sparse
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._triton import plan
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.hybrid_decode.api import hybrid_decode
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import KVView, Pooling, Selection, Softmax, Workspace
from walking import among, drawn, in_turn

BLOCK = 16
few = drawn(12)
rows_of_several_parts = cases(longest=70, dtypes=(torch.float32, torch.float16), head_dims=(8, 16, 24))


@pytest.fixture(autouse=True, scope="module")
def _several_parts() -> Iterator[None]:
    """Programs so small, and a machine so large, that short rows are cut into many parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "tuning", lambda *_: plan.Tuning(block=BLOCK, warps=4, stages=3, resident=8))
        yield


@few
@given(rows_of_several_parts, st.one_of(st.none(), poolings))
def test_dense_decode_scores_matches_the_oracle(case: Case, pooling: Pooling | None) -> None:
    expect_dense(case, pooling, "triton")


@few
@given(rows_of_several_parts, poolings)
def test_decode_scores_matches_the_oracle(case: Case, pooling: Pooling) -> None:
    expect_scores(decode_scores(case.q, case.kv, pooling=pooling, implementation="triton"), case, pooling)


@few
@given(
    rows_of_several_parts,
    st.sampled_from(("all", "kv", "query")),
    st.sampled_from((1, 4, 16, 24)),
    st.sampled_from((0, 3, 300)),
    st.integers(0, 2**31),
)
def test_sparse_decode_matches_the_oracle(case: Case, sets: str, unit: int, slack: int, seed: int) -> None:
    expect_sparse(case, sets, unit, slack, seed, "triton")


@few
@given(
    rows_of_several_parts,
    st.sampled_from(("all", "kv", "query")),
    st.sampled_from((1, 16)),
    st.one_of(st.none(), poolings),
    st.data(),
)
def test_hybrid_decode_matches_the_oracle(
    case: Case, sets: str, unit: int, pooling: Pooling | None, data: st.DataObject
) -> None:
    dense = data.draw(flags(case), label="dense")
    scored = None
    if pooling is not None and data.draw(st.booleans(), label="some"):
        scored = tuple(a and b for a, b in zip(dense, data.draw(flags(case)), strict=True))
    check(case, "triton", sets, unit, dense, pooling, scored, data.draw(st.integers(0, 2**31)))


@pytest.mark.parametrize(("pooling", "layout"), in_turn(get_args(Pooling), ["buffer", "paged"]))
def test_rows_shorter_than_the_bound_and_than_the_parts(pooling: Pooling, layout: str) -> None:
    """Parts without a token weigh nothing."""
    case = make_case(layout=layout, lengths=[200, 1, 33], kv_heads=1, group=2, head_dim=16, padding=7, loose=60)
    expect_dense(case, pooling, "triton")


@pytest.mark.parametrize("parts", among([1, 2, 5, 17], [2, 17]))
def test_any_number_of_parts(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "split_counts", lambda streams, _: (parts,) * len(streams))
    case = make_case(layout="buffer", lengths=[100, 7], kv_heads=2, group=2, head_dim=16, padding=7)
    expect_dense(case, None, "triton")
    expect_sparse(case, "kv", 1, 3, 0, "triton")
    check(case, "triton", "kv", 4, (True, False), "max", None, 0)


@pytest.mark.parametrize("group", [1, 7, 16, 17, 32])
def test_groups_around_the_size_of_a_tile(group: int) -> None:
    case = make_case(layout="buffer", lengths=[40], kv_heads=1, group=group, head_dim=16)
    for pooling in get_args(Pooling):
        expect_dense(case, pooling, "triton")


def test_one_call_twice_is_bitwise_the_same() -> None:
    case = make_case(layout="paged", lengths=[150, 7], kv_heads=2, group=2, head_dim=16, padding=7)
    once, again = (dense_decode_scores(case.q, case.kv, case.softmax, implementation="triton")[0] for _ in range(2))
    assert torch.equal(once, again)


def test_sixty_four_heads_are_told_apart() -> None:
    """The last one's bit is the sign of the number that holds the flags."""
    case = make_case(layout="buffer", lengths=[20], kv_heads=64, group=1, head_dim=8)
    dense: Flags = tuple(head in (0, 31, 32, 63) for head in range(64))
    check(case, "triton", "kv", 1, dense, "max", tuple(head in (31, 63) for head in range(64)), 0)


@pytest.mark.parametrize(("dtype", "per_head"), in_turn([torch.float8_e4m3fn, torch.float8_e5m2], [True, False]))
def test_a_quantised_cache_is_scaled(dtype: torch.dtype, per_head: bool) -> None:
    plain = make_case(layout="buffer", lengths=[50, 9], kv_heads=2, group=2, head_dim=16, padding=7)
    k_scale = torch.tensor([0.5, 2.0]) if per_head else torch.tensor(2.0)
    case = quantised(plain, k_scale, torch.tensor([4.0, 0.25]), torch.float32, dtype)
    for pooling in ("each", "mean"):
        expect_everything(case, "triton", "kv", 1, pooling, (False, True))


@pytest.mark.parametrize(("cache", "query"), [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_a_query_wider_or_narrower_than_the_cache(cache: torch.dtype, query: torch.dtype) -> None:
    case = make_case(layout="buffer", lengths=[50], kv_heads=2, group=2, head_dim=16, dtype=cache)
    expect_dense(replace(case, q=(case.q.float() * (1 + 2.0**-14)).to(query)), "max", "triton")


def test_a_call_that_the_kernels_cannot_take_is_refused() -> None:
    case = make_case(layout="buffer", lengths=[9], kv_heads=2, group=2, head_dim=8)
    selection, _ = choose(case, "kv", 1, 0, 0)

    def refused(q: Tensor, kv: KVView, words: str) -> None:
        with pytest.raises(KernelError, match=words):
            dense_decode_scores(q, kv, Softmax(0.3), implementation="triton")
        with pytest.raises(KernelError, match=words):
            decode_scores(q, kv, pooling="max", implementation="triton")
        with pytest.raises(KernelError, match=words):
            sparse_decode(q, kv, selection, Softmax(0.3), implementation="triton")
        with pytest.raises(KernelError, match=words):
            hybrid_decode(q, kv, selection, (True, False), Softmax(0.3), implementation="triton")

    refused(case.q.double(), case.kv, "q is torch.float64")
    refused(case.q, replace(case.kv, k=case.kv.k.double()), "cache is torch.float64")
    refused(case.q.repeat_interleave(17, dim=1), case.kv, "at most 32 on each of 64")
    wide = make_case(layout="buffer", lengths=[9], kv_heads=2, group=2, head_dim=257)
    refused(wide.q, wide.kv, "head dim 257 is more than 256")


def test_nobody_gets_the_interpreter_unasked() -> None:
    """A layout that only the reference reads on a CPU."""
    case = make_case(layout="strided", lengths=[9], kv_heads=2, group=2, head_dim=8)
    asked = dense_decode_scores(case.q, case.kv, case.softmax, implementation="reference")[0]
    assert torch.equal(dense_decode_scores(case.q, case.kv, case.softmax)[0], asked)


@pytest.mark.parametrize("streams", [((32, 64), (0, 0)), ((56, 2048), (0, 0)), ((4, 2048), (28, 64)), ((1, 1), (1, 9))])
def test_parts_fill_the_machine_and_are_alike(streams: tuple[tuple[int, int], ...]) -> None:
    places = 264
    counts = plan.split_counts(streams, places)
    assert all(1 <= count <= plan.MOST_SPLITS for count in counts)
    spans = [-(-blocks // count) for (number, blocks), count in zip(streams, counts, strict=True) if number]
    assert all(span <= max(spans) for span in spans)
    assert all(count <= max(blocks, 1) for (_, blocks), count in zip(streams, counts, strict=True))
    programs = sum(number * count for (number, _), count in zip(streams, counts, strict=True))
    most = sum(number * min(blocks, plan.MOST_SPLITS) for number, blocks in streams)
    assert programs >= min(most, places) * 0.75
    assert programs <= max(plan.MOST_WAVES * places, sum(number for number, _ in streams))


@pytest.mark.parametrize("rows", [28, 224, 4096])
def test_long_bounds_make_no_more_programs_than_rounds_are_worth(rows: int) -> None:
    """In a CUDA graph the bound is the longest row that may come, and most programs of a short one are for nothing."""
    (parts,) = plan.split_counts(((rows, 8192),), 264)
    assert parts * rows <= max(plan.MOST_WAVES * 264, rows)
    assert (parts + 1) * rows > 264


def test_a_set_of_one_token_far_from_the_others_is_found() -> None:
    """The last id of a long set, in the last part, whose key alone matters."""
    case = make_case(layout="paged", lengths=[90], kv_heads=1, group=1, head_dim=16, style="peaked", padding=7)
    selection = Selection(int32([[[*range(0, 80, 2), 89, *[-1] * 30]]]), int32([[41]]))
    out = sparse_decode(case.q, case.kv, selection, case.softmax, implementation="triton")
    expect_attention(out, case, [[[*range(0, 80, 2), 89]]])


@few
@given(
    rows_of_several_parts,
    st.sampled_from(("all", "kv", "query")),
    st.sampled_from((1, 16)),
    st.booleans(),
    st.integers(0, 2**31),
    st.data(),
)
def test_whole_rows_and_rows_that_only_pad(
    case: Case, sets: str, unit: int, hybrid: bool, seed: int, data: st.DataObject
) -> None:
    some = st.lists(st.booleans(), min_size=len(case.lengths), max_size=len(case.lengths))
    whole, empty = data.draw(some, label="whole"), data.draw(some, label="empty")
    selection, tokens = choose(case, sets, unit, 3, seed)
    gone = torch.tensor(empty)
    selection = replace(
        selection,
        ids=selection.ids.masked_fill(gone[:, None, None], -1),
        counts=selection.counts.masked_fill(gone[:, None], 0),
    )
    other = with_other_rows(case, whole, empty)
    workspace = Workspace.of(*case.q.shape[:2], case.q.device) if data.draw(st.booleans()) else None
    dense = data.draw(flags(case), label="dense") if hybrid else (False,) * case.kv.kv_heads
    if hybrid:
        out, _ = hybrid_decode(other.q, other.kv, selection, dense, other.softmax, implementation="triton")
    else:
        out = sparse_decode(other.q, other.kv, selection, other.softmax, workspace=workspace, implementation="triton")
    expect_other_rows(out, other, tokens, whole, dense)


@pytest.mark.parametrize(
    ("parts", "group", "sets", "sinks"),
    among(
        [(1, 2, "kv", False), (2, 5, "all", True), (5, 1, "kv", True), (5, 2, "query", True), (16, 2, "kv", False)],
        [(1, 2, "kv", False), (2, 5, "all", True), (5, 2, "query", True)],
    ),
)
def test_the_last_program_joins_the_parts(
    parts: int, group: int, sets: str, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another launch would, where there is memory to count in, which two launches in turn find as it was."""
    monkeypatch.setattr(plan, "split_counts", lambda streams, _: (parts,) * len(streams))
    case = make_case(layout="paged", lengths=[150, 7], kv_heads=2, group=group, head_dim=24, padding=7)
    selection, tokens = choose(case, sets, 1, 3, 0)
    softmax = Softmax(0.3, torch.linspace(-2, 2, 2 * group) if sinks else None)
    workspace = Workspace.of(2, 2 * group, case.q.device)
    apart = sparse_decode(case.q, case.kv, selection, softmax, implementation="triton")
    for _ in range(2):
        out = sparse_decode(case.q, case.kv, selection, softmax, workspace=workspace, implementation="triton")
        torch.testing.assert_close(out, apart)
        assert not workspace.turns.any()
    if not sinks:
        expect_attention(out, case, tokens)


def test_too_little_memory_to_count_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "split_counts", lambda streams, _: (2,) * len(streams))
    case = make_case(layout="paged", lengths=[40], kv_heads=1, group=2, head_dim=16)
    selection, _ = choose(case, "kv", 1, 3, 0)
    few = Workspace.of(1, 1, case.q.device)
    with pytest.raises(KernelError, match="holds 1 numbers, and 2 are needed"):
        sparse_decode(case.q, case.kv, selection, case.softmax, workspace=few, implementation="triton")


@few
@given(rows_of_several_parts, poolings, st.data())
def test_rows_that_only_pad_have_no_scores(case: Case, pooling: Pooling, data: st.DataObject) -> None:
    count = len(case.lengths)
    empty = data.draw(st.lists(st.booleans(), min_size=count, max_size=count), label="empty")
    other = with_other_rows(case, [False] * count, empty)
    out, scores = dense_decode_scores(other.q, other.kv, other.softmax, pooling=pooling, implementation="triton")
    assert scores is not None
    expect_scores(scores, other, pooling, ended=False)
    expect_other_rows(out, other, everything(other), [True] * count, (True,) * case.kv.kv_heads)


def test_a_batch_is_planned_as_the_next_that_is_captured() -> None:
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    assert [plan.padded(rows) for rows in range(1, 513)] == [
        next(size for size in sizes if size >= rows) for rows in range(1, 513)
    ]
