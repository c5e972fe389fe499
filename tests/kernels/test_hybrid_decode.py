"""Dense and sparse heads in one operation against float64 loops; the sets of dense heads hold nonsense."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_caches import Case, cases, make_case
from kernel_checks import (
    attention_implementations,
    expect_attention,
    expect_scores,
    fast_attention,
    poolings,
    takes,
    threads,
)
from test_sparse_decode import choose
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import oracles
from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels._native import library as native
from saccade.kernels.dense_decode_scores.api import decode_scores
from saccade.kernels.hybrid_decode.api import hybrid_decode
from saccade.types import KVView, Pooling, Rows, Selection, Softmax

Flags = tuple[bool, ...]
Sets = list[list[list[int]]]
widths = (4, 8, 16) if "native" in fast_attention else ()


def spoil(selection: Selection, dense: Flags) -> Selection:
    """Nonsense in the sets of dense heads: ids no row has, and counts from "none" to more than the buffer holds."""
    if selection.groups == 1:
        return selection
    ids, counts = selection.ids.clone(), selection.counts.clone()
    each = selection.groups // len(dense)
    for number, head in enumerate([head for head, flag in enumerate(dense) if flag]):
        rows = slice(head * each, (head + 1) * each)
        ids[:, rows] = (-1, 2**31 - 1, -(2**31))[number % 3]
        counts[:, rows] = (0, 10**6, -7)[number % 3]
    return Selection(ids, counts, selection.unit)


def draw(case: Case, sets: str, unit: int, dense: Flags, seed: int) -> tuple[Selection, Sets]:
    """A selection, and the positions that each row and query head attends to."""
    selection, chosen = choose(case, sets, unit, 3, seed)
    wanted = [
        oracles.hybrid_sets(dense, row, length, case.q.shape[1])
        for row, length in zip(chosen, case.lengths, strict=True)
    ]
    return spoil(selection, dense), wanted


def part(case: Case, scored: Flags) -> Case:
    """The case with the scored heads only, as `expect_scores` wants it."""
    group = case.q.shape[1] // case.kv.kv_heads
    heads = [head for head, flag in enumerate(scored) if flag]
    queries = [head * group + each for head in heads for each in range(group)]
    return Case(
        layout=case.layout,
        lengths=case.lengths,
        kv=KVView(case.kv.k[:, :, heads], case.kv.v[:, :, heads], case.kv.rows),
        q=case.q[:, queries],
        keys=[[row[head] for head in heads] for row in case.keys],
        values=[[row[head] for head in heads] for row in case.values],
    )


def flags(case: Case) -> st.SearchStrategy[Flags]:
    return st.tuples(*[st.booleans()] * case.kv.kv_heads)


def check(
    case: Case,
    implementation: Implementation,
    sets: str,
    unit: int,
    dense: Flags,
    pooling: Pooling | None,
    scored: Flags | None,
    seed: int,
) -> None:
    selection, wanted = draw(case, sets, unit, dense, seed)
    out, scores = hybrid_decode(
        case.q, case.kv, selection, dense, case.softmax, pooling=pooling, scored=scored, implementation=implementation
    )
    expect_attention(out, case, wanted)
    if pooling is None:
        assert scores is None
        return
    assert scores is not None
    kept = dense if scored is None else scored
    if any(kept):
        expect_scores(scores, part(case, kept), pooling, ended=implementation != "triton")
    else:
        assert scores.shape == (len(case.lengths), 0, case.kv.rows.max_len)
        assert scores.dtype == torch.float32


@given(
    cases(),
    attention_implementations,
    st.sampled_from(("all", "kv", "query")),
    st.sampled_from((1, 4, 16)),
    st.one_of(st.none(), poolings),
    st.data(),
)
def test_hybrid_decode_matches_the_oracle(
    case: Case, implementation: Implementation, sets: str, unit: int, pooling: Pooling | None, data: st.DataObject
) -> None:
    assume(takes(implementation, case))
    dense = data.draw(flags(case), label="dense")
    scored = None
    if data.draw(st.booleans(), label="some"):
        scored = tuple(pooling is not None and a and b for a, b in zip(dense, data.draw(flags(case)), strict=True))
    check(case, implementation, sets, unit, dense, pooling, scored, data.draw(st.integers(0, 2**31)))


@pytest.mark.parametrize("lanes", widths)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["buffer", "paged"])
def test_every_width(layout: str, dtype: torch.dtype, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "widest", lanes)
    for group in (1, 5):
        case = make_case(
            layout=layout, lengths=[70, 33, 9], kv_heads=4, group=group, head_dim=32, dtype=dtype, padding=7
        )
        for pooling in get_args(Pooling):
            dense, scored = (True, False, True, True), (False, False, True, True)
            check(case, "native", "query", 4, dense, pooling, scored, group)


@pytest.mark.parametrize("pooling", get_args(Pooling))
@pytest.mark.parametrize("implementation", fast_attention)
def test_rows_and_sets_of_several_spans(pooling: Pooling, implementation: Implementation) -> None:
    """Two threads and enough bytes that long heads, and long sets, are cut while short ones are one span."""
    case = make_case(layout="buffer", lengths=[1100, 7, 701], kv_heads=3, group=2, head_dim=64, padding=7)
    dense = (False, True, False)
    with threads(2):
        for sets, unit in (("query", 1), ("kv", 16)):
            check(case, implementation, sets, unit, dense, pooling, None, 3)


@pytest.mark.skipif("native" not in fast_attention, reason="no library was built")
def test_the_cut_depends_on_the_number_of_threads_alone() -> None:
    """Not on who was faster; and a head's spans are joined to what it gives by itself, up to rounding."""
    case = make_case(layout="paged", lengths=[3000, 7], kv_heads=3, group=2, head_dim=64, padding=7)
    selection, _ = draw(case, "kv", 1, (True, False, True), 0)
    outputs = []
    for count in (1, 2, 2, 2):
        with threads(count):
            outputs.append(hybrid_decode(case.q, case.kv, selection, (True, False, True), case.softmax)[0])
    assert not torch.equal(outputs[0], outputs[1])  # else nothing was cut
    assert torch.equal(outputs[1], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dense", [(True, True, True), (False, False, False), (False, True, True)])
def test_the_scores_are_those_of_decode_scores(dense: Flags, count: int) -> None:
    """Bit for bit: a set must not depend on which of the two operations scored it."""
    case = make_case(layout="buffer", lengths=[3000, 7], kv_heads=3, group=2, head_dim=64, dtype=torch.bfloat16)
    selection, _ = draw(case, "kv", 1, dense, 0)
    with threads(count):
        for pooling in get_args(Pooling):
            scored = (dense[0], False, dense[2])
            _, scores = hybrid_decode(
                case.q, case.kv, selection, dense, case.softmax, pooling=pooling, scored=scored, implementation="auto"
            )
            all_scores = decode_scores(case.q, case.kv, pooling=pooling).unflatten(1, (3, -1))
            wanted = [all_scores[:, head] for head, flag in enumerate(scored) if flag]
            assert scores is not None
            assert torch.equal(scores, torch.cat([all_scores[:, :0].flatten(1, 2), *wanted], dim=1))


@pytest.mark.parametrize("implementation", ["reference", *fast_attention])
def test_results_outlive_the_next_call(implementation: Implementation) -> None:
    case = make_case(layout="buffer", lengths=[9000], kv_heads=2, group=2, head_dim=16)
    selection, _ = draw(case, "kv", 1, (True, False), 0)

    def once(kv: KVView) -> tuple[Tensor, Tensor]:
        out, scores = hybrid_decode(
            case.q, kv, selection, (True, False), Softmax(0.3), pooling="max", implementation=implementation
        )
        assert scores is not None
        return out, scores

    results = once(case.kv)
    before = [result.clone() for result in results]
    once(KVView(case.kv.k + 1.0, case.kv.v + 1.0, case.kv.rows))
    assert all(torch.equal(result, copy) for result, copy in zip(results, before, strict=True))


def test_the_reference_does_not_synchronise_with_the_host() -> None:
    with FakeTensorMode():
        zeros = torch.zeros(2, dtype=torch.int32)
        kv = KVView(
            torch.empty(6, 16, 2, 8), torch.empty(6, 16, 2, 8), Rows(zeros[:, None].expand(-1, 3), zeros, zeros + 1, 40)
        )
        selection = Selection(torch.zeros(2, 2, 5, dtype=torch.int32), zeros[:, None].expand(-1, 2))
        out, scores = hybrid_decode(
            torch.empty(2, 4, 8), kv, selection, (False, True), Softmax(0.3), pooling="each", implementation="reference"
        )
        assert out.shape == (2, 4, 8)
        assert scores is not None
        assert scores.shape == (2, 2, 40)


@pytest.mark.parametrize("implementation", fast_attention)
def test_an_explicit_implementation_never_falls_back(implementation: Implementation) -> None:
    case = make_case(layout="strided", lengths=[9], kv_heads=2, group=2, head_dim=16)
    selection, wanted = draw(case, "kv", 1, (True, False), 0)
    for requested, words in ((implementation, "strides"), ("fast", "unknown implementation")):
        with pytest.raises(KernelError, match=words):
            hybrid_decode(case.q, case.kv, selection, (True, False), case.softmax, implementation=requested)  # type: ignore[arg-type]
    out, _ = hybrid_decode(case.q, case.kv, selection, (True, False), case.softmax)
    expect_attention(out, case, wanted)


def test_arguments_that_do_not_fit_are_named() -> None:
    case = make_case(layout="buffer", lengths=[9], kv_heads=2, group=2, head_dim=16)
    good, _ = choose(case, "kv", 1, 0, 0)
    dense = (True, False)
    wrong: list[tuple[Selection, Flags, Pooling | None, Flags | None, str]] = [
        (good, (True,), None, None, "dense flags 1 heads, the cache has 2"),
        (good, dense, "max", (True,), "scored flags 1 heads"),
        (good, dense, "max", (True, True), "scored flags head 1"),
        (good, dense, None, (True, False), "need a pooling"),
        (good, dense, "sum", None, "pooling"),  # type: ignore[list-item]
        (Selection(good.ids.long(), good.counts), dense, None, None, "int32"),
        (Selection(good.ids[:, [0, 1, 1]], good.counts[:, [0, 1, 1]]), dense, None, None, "3 sets"),
        (Selection(good.ids, good.counts[0]), dense, None, None, "counts"),
        (Selection(good.ids, good.counts, 0), dense, None, None, "unit 0"),
        (Selection(good.ids[..., :0], good.counts), dense, None, None, "M >= 1"),
    ]
    for selection, heads, pooling, scored, words in wrong:
        with pytest.raises(KernelError, match=words):
            hybrid_decode(case.q, case.kv, selection, heads, case.softmax, pooling=pooling, scored=scored)
    with pytest.raises(KernelError, match="multiple"):
        hybrid_decode(case.q[:, :3], case.kv, good, dense, case.softmax)
