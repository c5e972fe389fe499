"""Decoding attention on CPUs: long rows, threads, memory that is kept, what does not fit, and who refuses a call."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from attention_contract import *  # noqa: F403 - its tests, of these implementations
from attention_contract import choose, choose_for_some, expect_sparse, operations
from kernel_caches import LAYOUTS, Case, int32, make_case
from kernel_checks import (
    every_attention,
    everything,
    expect_attention,
    expect_dense,
    fast_attention,
    needs_the_library,
    refused,
    threads,
    with_other_rows,
)
from quantised import (
    small,
    test_attention_matches_the_oracle,  # noqa: F401
)
from torch import Tensor

from saccade.kernels._dispatch import Implementation
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.hybrid_decode.api import hybrid_decode
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import Flags, KVView, Pooling, Rows, Selection, Softmax

every_fast_one = pytest.mark.parametrize("implementation", fast_attention)


@every_fast_one
@pytest.mark.parametrize(("layout", "dtype"), [("buffer", torch.float32), ("paged", torch.bfloat16)])
def test_rows_of_several_blocks(layout: str, dtype: torch.dtype, implementation: Implementation) -> None:
    """Longer than every block of the CPU paths, with a ragged end."""
    case = make_case(layout=layout, lengths=[17000, 4103], kv_heads=1, dtype=dtype, padding=7)
    expect_dense(case, "max", implementation)


@pytest.mark.parametrize(("layout", "count", "head_dim"), [("buffer", 512, 128), ("paged", 700, 48)])
def test_sets_wide_enough_for_the_bfloat16_product(layout: str, count: int, head_dim: int) -> None:
    case = make_case(layout=layout, lengths=[900], head_dim=head_dim, dtype=torch.bfloat16, padding=7)
    chosen = sorted(random.Random(0).sample(range(900), count))
    selection = Selection(int32([[chosen]]), int32([[count]]))
    out = sparse_decode(case.q, case.kv, selection, case.softmax, implementation="cpu")
    expect_attention(out, case, [[chosen] * 4])


@needs_the_library
@pytest.mark.parametrize(
    ("layout", "dense"),
    [
        ("buffer", (True, True, True)),
        ("paged", (False, True, True)),
        ("columns", (True, False, True)),
        ("paged", (False, False, False)),
    ],
)
def test_two_threads(layout: str, dense: Flags) -> None:
    """Enough bytes that long heads and long sets are cut into spans; the cut depends on the number of threads alone.

    The scores are those of `decode_scores`, bit for bit: a set must not depend on which operation scored it.
    """
    case = make_case(layout=layout, lengths=[2100, 7, 1200], kv_heads=3, head_dim=64, padding=7)
    selection, tokens = choose_for_some(case, "kv", 1, dense, 0)
    given, scored = (case.q, case.kv, selection, dense, case.softmax), (dense[0], False, dense[2])
    outputs = [hybrid_decode(*given, implementation="native")[0]]
    with threads(2):
        for pooling in get_args(Pooling):
            out, scores = hybrid_decode(*given, pooling=pooling, scored=scored, implementation="native")
            outputs.append(out)
            every = decode_scores(case.q, case.kv, pooling=pooling, implementation="native")
            wanted = every.unflatten(1, (3, -1))[:, [head for head, flag in enumerate(scored) if flag]].flatten(1, 2)
            assert scores is not None and torch.equal(scores, wanted)
            whole = dense_decode_scores(case.q, case.kv, case.softmax, pooling=pooling, implementation="native")[1]
            assert whole is not None and torch.equal(whole, every)
        expect_dense(case, None, "native")
        expect_sparse(case, "kv", 16, 5, 3, "native")
    expect_attention(outputs[1], case, tokens)
    assert [torch.equal(outputs[1], other) for other in outputs] == [False, True, True, True]  # else nothing was cut


def test_auto_takes_every_layout() -> None:
    for layout in LAYOUTS:
        expect_dense(make_case(layout=layout, lengths=[9, 4], group=3, head_dim=8), None, "auto")


@pytest.mark.parametrize("length", [9, 20000])
@pytest.mark.parametrize("implementation", every_attention)
def test_results_outlive_the_next_call(length: int, implementation: Implementation) -> None:
    """The CPU path keeps its working memory; nothing it returns may lie there."""
    case = make_case(lengths=[length])
    other = replace(case, kv=replace(case.kv, k=case.kv.k + 1.0, v=case.kv.v + 1.0))

    def results(of: Any, pooling: Pooling) -> list[Tensor]:
        found = [operation(implementation) for operation in operations(of, pooling).values()]
        return [part for one in found for part in (one if isinstance(one, tuple) else (one,))]

    for pooling in get_args(Pooling):
        kept = results(case, pooling)
        before = [result.clone() for result in kept]
        results(other, pooling)
        assert len(before) == 6
        assert all(torch.equal(result, copy) for result, copy in zip(kept, before, strict=True))


def test_working_memory_serves_inside_and_outside_inference_mode() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    # Longer than what any test before has left behind, so that the first call makes the memory.
    k = torch.randn(1, 9000, 1, 8, dtype=torch.float16)
    kv = KVView(k, k, Rows.on_host(table, [0], [8990], max_len=9000))
    q = torch.randn(1, 1, 8, dtype=torch.float16)
    with torch.inference_mode():
        inside, _ = dense_decode_scores(q, kv, Softmax(0.3), pooling="each", implementation="cpu")
    outside, _ = dense_decode_scores(q, kv, Softmax(0.3), pooling="each", implementation="cpu")
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("value_dim", [None, 24])
def test_the_result_goes_where_it_is_wanted(value_dim: int | None) -> None:
    case = make_case(lengths=[9, 5], value_dim=value_dim)
    selection, tokens = choose(case, "kv", 1, 0, 0)
    out = torch.full((2, 4, value_dim or 16), torch.nan)
    assert dense_decode_scores(case.q, case.kv, case.softmax, out=out)[0] is out
    expect_attention(out, case, everything(case))
    assert sparse_decode(case.q, case.kv, selection, case.softmax, out=out) is out
    expect_attention(out, case, tokens)
    for wrong in (out[:1], out[..., :8], out.double(), out.transpose(0, 1).contiguous().transpose(0, 1)):
        refused("out must be contiguous", sparse_decode, case.q, case.kv, selection, case.softmax, out=wrong)


def test_a_number_that_is_none_shows_where_it_is_read_and_nowhere_else() -> None:
    """8 bits have a NaN: within a row it reaches that row's head, behind a row nothing reads it."""
    case = small()
    case.kv.k[case.kv.rows.page_table[1, 0], 4 + int(case.kv.rows.row_start[1]), 0, 3] = torch.nan
    out, _ = dense_decode_scores(case.q, case.kv, case.softmax, implementation="reference")
    assert out.isnan().any(dim=-1).tolist() == [[False] * 4, [True, True, False, False]]


def test_arguments_that_do_not_fit_are_named() -> None:
    case = make_case(lengths=[9], head_dim=8)
    q, kv = case.q, case.kv
    for wrong, words in (
        (q[:, :3], "multiple"),
        (q[..., :4], "head dim"),
        (q[0], r"\[B, Hq, d\]"),
        (q.int(), "floating"),
    ):
        refused(words, dense_decode_scores, wrong, kv, case.softmax)
        refused(words, decode_scores, wrong, kv, pooling="max")
    refused("pooling", decode_scores, q, kv, pooling="sum")
    refused(r"sinks must be contiguous \[4\] on cpu, got \[2\]", dense_decode_scores, q, kv, Softmax(0.3, q[0, :2, 0]))
    refused("cap must be more than 0 and finite, got -1", dense_decode_scores, q, kv, Softmax(0.3, cap=-1.0))


def test_selections_that_do_not_fit_are_named() -> None:
    case = make_case(lengths=[9], head_dim=8)
    dense: Flags = (True, False)
    good, _ = choose(case, "kv", 1, 0, 0)
    ids, counts = good.ids, good.counts
    for wrong, words in (
        (Selection(ids.long(), counts), "int32"),
        (Selection(ids[:, [0, 1, 1]], counts[:, [0, 1, 1]]), "3 sets"),
        (Selection(ids, counts[0]), "counts"),
        (Selection(ids, counts, 0), "unit 0"),
        (Selection(ids[..., :0], counts), "M >= 1"),
    ):
        refused(words, sparse_decode, case.q, case.kv, wrong, case.softmax)
        refused(words, hybrid_decode, case.q, case.kv, wrong, dense, case.softmax)
    for heads, pooling, scored, words in (
        ((True,), None, None, "dense flags 1 heads, the cache has 2"),
        (dense, "max", (True,), "scored flags 1 heads"),
        (dense, "max", (True, True), "scored flags head 1"),
        (dense, None, (True, False), "need a pooling"),
        (dense, "sum", None, "pooling"),
    ):
        refused(words, hybrid_decode, case.q, case.kv, good, heads, case.softmax, pooling=pooling, scored=scored)
    refused("multiple", hybrid_decode, case.q[:, :3], case.kv, good, dense, case.softmax)


def narrow_values() -> Case:
    case = make_case(lengths=[9])
    return replace(case, kv=replace(case.kv, v=case.kv.v[..., :8].contiguous()))


def turned(case: Case) -> Case:
    return replace(case, kv=replace(case.kv, v=case.kv.v.transpose(1, 3).contiguous().transpose(1, 3)))


STRIDES, WIDTHS, WHOLE, SCALED = (
    dict.fromkeys(("cpu", "native"), words)
    for words in ("strides", "values are 8 wide, keys 16", "it knows neither rows that are whole", "quantised")
)
UNFIT: dict[str, tuple[Callable[[], Case], dict[str, str]]] = {
    "strided": (lambda: make_case(layout="strided", lengths=[9]), STRIDES),
    "narrow columns": (lambda: make_case(layout="columns", page=3, lengths=[9]), STRIDES),
    "values as columns": (lambda: turned(make_case(layout="columns", page=16, lengths=[9])), STRIDES),
    "quantised": (small, {"cpu": "quantised", "native": "float8_e4m3fn"}),
    "scaled": (lambda: replace(case := make_case(lengths=[9]), kv=replace(case.kv, v_scale=torch.ones(2))), SCALED),
    "narrow values": (narrow_values, {**WIDTHS, "triton": WIDTHS["cpu"]}),
    "whole rows": (lambda: with_other_rows(make_case(lengths=[9]), [True], [False]), WHOLE),
    "head dim": (lambda: make_case(lengths=[9], head_dim=24), {"native": "head dim 24"}),
    "half": (lambda: make_case(lengths=[9], dtype=torch.float16), {"native": "float16"}),
    "group": (lambda: make_case(lengths=[9], kv_heads=1, group=33), {"native": "33 query heads"}),
}


@pytest.mark.parametrize("name", UNFIT)
def test_who_cannot_take_a_cache_says_why(name: str) -> None:
    make, reasons = UNFIT[name]
    for operation in operations(make()).values():
        for implementation, words in reasons.items():
            if implementation in (*fast_attention, "triton"):
                refused(f"'{implementation}' cannot take this call: .*{words}", operation, implementation)
        found, wanted = operation("auto"), operation("reference")
        torch.testing.assert_close(found, wanted, **({"rtol": 0, "atol": 0} if "cpu" in reasons else {}))


def test_an_unknown_implementation_is_named() -> None:
    for operation in operations(make_case(lengths=[9])).values():
        refused("unknown implementation 'fast'", operation, "fast")
