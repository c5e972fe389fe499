"""Decoding attention on CPUs: long rows, threads, memory that is kept, and what does not fit."""

import random
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from attention_contract import (
    choose,
    choose_for_some,
    expect_hybrid,
    operations,
    test_all_tokens_match_the_oracle,  # noqa: F401 - of these implementations
    test_heads_that_differ_match_the_oracle,  # noqa: F401
    test_rows_that_only_pad_have_no_scores,  # noqa: F401
    test_sets_match_the_oracle,  # noqa: F401
    test_whole_rows_and_rows_that_only_pad,  # noqa: F401
)
from kernel_caches import LAYOUTS, int32, make_case
from kernel_checks import (
    every_attention,
    everything,
    expect_attention,
    expect_dense,
    fast_attention,
    needs_the_library,
    refused,
    threads,
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


@every_fast_one
def test_rows_and_sets_of_several_spans(implementation: Implementation) -> None:
    """Two threads and enough bytes that long heads, and long sets, are cut while short ones are one span."""
    case = make_case(lengths=[1100, 7, 701], kv_heads=3, head_dim=64, padding=7)
    with threads(2):
        for sets, unit, pooling in (("query", 1, "max"), ("kv", 16, "mean"), ("kv", 1, "each")):
            expect_hybrid(case, sets, unit, (False, True, False), implementation, pooling=pooling, seed=3)


@needs_the_library
def test_the_cut_depends_on_the_number_of_threads_alone() -> None:
    """Not on who was faster; and a head's spans are joined to what it gives by itself, up to rounding."""
    case = make_case(layout="paged", lengths=[3000, 7], kv_heads=3, head_dim=64, padding=7)
    selection, _ = choose_for_some(case, "kv", 1, (True, False, True), 0)
    outputs = []
    for count in (1, 2, 2, 2):
        with threads(count):
            outputs.append(hybrid_decode(case.q, case.kv, selection, (True, False, True), case.softmax)[0])
    assert not torch.equal(outputs[0], outputs[1])  # else nothing was cut
    assert torch.equal(outputs[1], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


@pytest.mark.parametrize("dense", [(True, True, True), (False, False, False), (False, True, True)])
def test_the_scores_are_those_of_decode_scores(dense: Flags) -> None:
    """Bit for bit: a set must not depend on which of the two operations scored it."""
    case = make_case(lengths=[3000, 7], kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    selection, _ = choose_for_some(case, "kv", 1, dense, 0)
    scored = (dense[0], False, dense[2])
    for count, pooling in zip((1, 2, 2), get_args(Pooling), strict=True):
        with threads(count):
            _, scores = hybrid_decode(case.q, case.kv, selection, dense, case.softmax, pooling=pooling, scored=scored)
            all_scores = decode_scores(case.q, case.kv, pooling=pooling).unflatten(1, (3, -1))
        wanted = [all_scores[:, head] for head, flag in enumerate(scored) if flag]
        assert scores is not None
        assert torch.equal(scores, torch.cat([all_scores[:, :0].flatten(1, 2), *wanted], dim=1))


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
