"""Comparing results with the oracles, within the error budgets; and the choices that every operation's test draws.

The contract of an operation is a file of its own beside this one, whose tests the folder `interpreted` runs too: there
every choice of an implementation is Triton's kernels.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from kernel_budgets import attention_error, largest_query, score_error
from kernel_caches import Case, cases
from torch import Tensor

import oracles
from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels._native import library as native
from saccade.kernels._native.attention import native_refusal
from saccade.kernels.dense_decode_scores.api import dense_decode_scores
from saccade.types import Pooling
from walking import drawn, walk

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# test_native.py asserts that the library is there wherever it can be built.
built = native.library() is not None
fast_attention = ("cpu", "native") if built else ("cpu",)
every_attention = ("triton",) if INTERPRETED else ("reference", *fast_attention)
# Of operations that have none for torch on a CPU alone.
fast_index = fast_attention[1:] or ("reference",)
every_index = ("triton",) if INTERPRETED else ("reference", *fast_attention[1:])
every_implementation = pytest.mark.parametrize("implementation", every_index)
index_implementations = st.sampled_from(every_index)
poolings = st.sampled_from(get_args(Pooling))
groupings = st.sampled_from(("all", "kv", "query"))
seeds = st.integers(0, 2**31)
DEVICES = [90, *(pytest.param(one, marks=walk) for one in (80, 100, 120))]
"""Compute capabilities: of an H100 every time, of an A100 and two Blackwells in `make walk`, but for attention."""


class Run(NamedTuple):
    """An implementation, and of the C library the most floats of a vector."""

    implementation: Implementation
    lanes: int = 0

    def __str__(self) -> str:
        return f"{self.implementation}{self.lanes or ''}"

    @contextmanager
    def chosen(self) -> Iterator[Implementation]:
        """The implementation, while vectors have this width."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "widest", self.lanes)
            yield self.implementation

    def cases(self) -> st.SearchStrategy[Case]:
        """Caches that the implementation is meant to take; short ones of few numbers in the interpreter."""
        if INTERPRETED:
            return cases(longest=70, dtypes=(torch.float32, torch.float16), head_dims=(8, 16, 24))
        if self.implementation == "native":
            fitting = cases(dtypes=(torch.float32, torch.bfloat16), head_dims=(16, 32, 48, 64, 80, 96, 128))
            return fitting.filter(lambda case: native_refusal(case.q, case.kv) is None)
        if self.implementation == "cpu":
            return cases().filter(lambda case: case.layout not in ("columns", "strided"))
        return cases(value_dims=(None, None, 1, 24))


# Of 4, 8 and 16 floats, and 32 for products of bfloat16, those for which this machine has code of its own.
_levels = {native.loaded().saccade_level(native.MOST_DIM, most): most for most in (32, 16, 8, 4)} if built else {}
WIDTHS = tuple(sorted(_levels.values()))
_runs = (Run("triton"),) if INTERPRETED else (Run("reference"), *(Run("native", lanes) for lanes in WIDTHS))
every_width = pytest.mark.parametrize("lanes", WIDTHS, ids="native{}".format)
every_index_run = pytest.mark.parametrize("run", _runs, ids=str)
every_attention_run = pytest.mark.parametrize("run", _runs if INTERPRETED else (*_runs, Run("cpu")), ids=str)
needs_the_library = pytest.mark.skipif(not built, reason="no library was built")


def refused(words: str, call: Callable[..., object], *given: Any, **options: Any) -> None:
    """The call raises a KernelError that says so."""
    with pytest.raises(KernelError, match=words):
        call(*given, **options)


def fewer(examples: int) -> settings:
    """So many drawn examples in the interpreter, which is slow; as many as ever elsewhere."""
    return drawn(examples) if INTERPRETED else settings()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many for a while, one again behind it."""
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def expect_scores(scores: Tensor, case: Case, pooling: Pooling, *, ended: bool = True) -> None:
    """`ended`: -inf follows each row; else what follows is undefined."""
    group = case.q.shape[1] // case.kv.kv_heads
    heads = case.q.shape[1] if pooling == "each" else case.kv.kv_heads
    assert scores.dtype == torch.float32
    assert scores.shape == (len(case.lengths), heads, case.kv.rows.max_len)
    for row, length in enumerate(case.lengths):
        queries, keys = case.queries[row], case.keys[row]
        for index, expected in enumerate(oracles.raw_scores(queries, keys, pooling)):
            head = index // group if pooling == "each" else index
            bound = largest_query(queries[head * group : (head + 1) * group])
            got = scores[row, index, : len(expected)].double().cpu().numpy()
            assert (np.abs(got - expected) <= score_error(bound, keys[head], group)).all()
            assert not ended or all(score == -math.inf for score in scores[row, index, length:].tolist())


def expect_attention(out: Tensor, case: Case, chosen: list[list[list[int]]]) -> None:
    """`chosen[row][query head]` are the positions attended to.

    With a share f of the weight left to tokens by a sink, the error is at most f of that without, and f (1 - f) of the
    same relative error of the sums that f is made of: never more than without, since f (2 - f) <= 1.
    """
    group = case.q.shape[1] // case.kv.kv_heads
    assert out.dtype == case.q.dtype
    assert out.shape == (*case.q.shape[:2], case.kv.v.shape[3])
    for row, sets in enumerate(chosen):
        queries, keys, values = case.queries[row], case.keys[row], case.values[row]
        scale, cap = case.softmax.scale, case.softmax.cap
        wanted = oracles.attention(queries, keys, values, sets, scale, cap)
        for head, expected in enumerate(wanted):
            kv_head = head // group
            own = queries[head], keys[kv_head], values[kv_head], sets[head]
            bounds = attention_error(*own, scale, case.q.dtype, cap)
            left = 1.0 if case.softmax.sinks is None else share_left(case, row, head, sets[head])
            got = out[row, head].double().cpu().numpy()
            assert (np.abs(got - left * np.array(expected)) <= bounds).all()


def share_left(case: Case, row: int, head: int, chosen: list[int]) -> float:
    """What a sink leaves of a query head's weights to the tokens that it attends to."""
    softmax = case.softmax
    assert softmax.sinks is not None
    keys = case.keys[row][head // (case.q.shape[1] // case.kv.kv_heads)]
    query = case.queries[row][head]
    logits = oracles.capped(softmax.scale * (keys[chosen] @ query), softmax.cap)
    sink = float(softmax.sinks[head])
    largest = max(float(logits.max()), sink)
    tokens = float(np.exp(logits - largest).sum())
    return tokens / (tokens + math.exp(sink - largest))


def expect_dense(case: Case, pooling: Pooling | None, implementation: Implementation) -> tuple[Tensor, Tensor | None]:
    """Attention to all tokens, and their scores if there is a pooling: both are what loops say. Returns both."""
    out, scores = dense_decode_scores(case.q, case.kv, case.softmax, pooling=pooling, implementation=implementation)
    expect_attention(out, case, everything(case))
    assert (scores is None) == (pooling is None)
    if scores is not None and pooling is not None:
        expect_scores(scores, case, pooling, ended=implementation != "triton")
    return out, scores


def everything(case: Case) -> list[list[list[int]]]:
    return [[list(range(length))] * case.q.shape[1] for length in case.lengths]


def with_other_rows(case: Case, whole: list[bool], empty: list[bool], *, nowhere: bool = True) -> Case:
    """The same rows, of which some attend to all their tokens, and some are empty and may lie nowhere."""
    rows, gone = case.kv.rows, torch.tensor(empty)
    lengths = [0 if nothing else length for length, nothing in zip(case.lengths, empty, strict=True)]
    changed = replace(
        rows,
        page_table=rows.page_table.masked_fill(gone[:, None], 10**6)
        if nowhere and rows.page_table.shape[1] > 1
        else rows.page_table,
        seq_lens=rows.seq_lens.masked_fill(gone, 0),
        bounds=None,
        whole=torch.tensor(whole),
    )
    keys, values = (
        [[head[:length] for head in row] for row, length in zip(held, lengths, strict=True)]
        for held in (case.keys, case.values)
    )
    return replace(case, lengths=lengths, kv=replace(case.kv, rows=changed), keys=keys, values=values)


def only(case: Case, rows: list[int]) -> Case:
    """Some rows of what a result is compared with."""
    parts = {name: [getattr(case, name)[row] for row in rows] for name in ("lengths", "keys", "values")}
    return replace(case, q=case.q[rows], **parts)


def expect_other_rows(
    out: Tensor, case: Case, tokens: list[list[list[int]]], whole: list[bool], dense: tuple[bool, ...]
) -> None:
    """Whole rows attend to everything, heads flagged `dense` too; of empty rows all is 0, not NaN."""
    group = case.q.shape[1] // case.kv.kv_heads
    present = [row for row, length in enumerate(case.lengths) if length]
    wanted = [
        [
            every if whole[row] or dense[head // group] else chosen
            for head, (chosen, every) in enumerate(zip(tokens[row], everything(case)[row], strict=True))
        ]
        for row in present
    ]
    expect_attention(out[present], only(case, present), wanted)
    assert bool((out[[row for row, length in enumerate(case.lengths) if not length]] == 0).all())
