"""What every implementation of decoding attention gives: of all tokens, of sets, of both, and the scores on the way."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_caches import Case, int32
from kernel_checks import (
    INTERPRETED,
    Run,
    every_attention_run,
    everything,
    expect_attention,
    expect_dense,
    expect_other_rows,
    expect_scores,
    fewer,
    groupings,
    poolings,
    seeds,
    with_other_rows,
)

import oracles
from saccade.kernels._dispatch import Implementation
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.hybrid_decode.api import hybrid_decode
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import Flags, KVView, Pooling, Selection, Workspace

Sets = list[list[list[int]]]
"""Positions by row and query head."""


def choose(case: Case, sets: str, unit: int, slack: int, seed: int) -> tuple[Selection, Sets]:
    """A random selection, its buffer `slack` wider than the largest set; and its tokens per row and query head."""
    pick = random.Random(seed)
    query_heads, kv_heads = case.q.shape[1], case.kv.kv_heads
    groups = {"all": 1, "kv": kv_heads, "query": query_heads}[sets]
    chosen = []
    for length in case.lengths:
        units = -(-length // unit)
        chosen.append([sorted(pick.sample(range(units), pick.randint(1, units))) for _ in range(groups)])
    width = max(len(units) for row in chosen for units in row) + slack
    ids = [[units + [-1] * (width - len(units)) for units in row] for row in chosen]
    counts = [[len(units) for units in row] for row in chosen]
    tokens = [
        [oracles.unit_tokens(row[head * groups // query_heads], unit, length) for head in range(query_heads)]
        for row, length in zip(chosen, case.lengths, strict=True)
    ]
    return Selection(int32(ids, case.q.device), int32(counts, case.q.device), unit), tokens


def expect_sparse(case: Case, sets: str, unit: int, slack: int, seed: int, implementation: Implementation) -> None:
    """Attention to sets drawn by `choose`."""
    selection, tokens = choose(case, sets, unit, slack, seed)
    out = sparse_decode(case.q, case.kv, selection, case.softmax, implementation=implementation)
    expect_attention(out, case, tokens)


def choose_for_some(case: Case, sets: str, unit: int, dense: Flags, seed: int) -> tuple[Selection, Sets]:
    """A selection with nonsense for dense heads, and the positions that each row and query head attends to."""
    selection, chosen = choose(case, sets, unit, 3, seed)
    wanted = [
        oracles.hybrid_sets(dense, row, length, case.q.shape[1])
        for row, length in zip(chosen, case.lengths, strict=True)
    ]
    if selection.groups == 1:
        return selection, wanted
    # Ids that no row has, and counts from "none" to more than the buffer holds.
    ids, counts = selection.ids.clone(), selection.counts.clone()
    each = selection.groups // len(dense)
    for number, head in enumerate([head for head, flag in enumerate(dense) if flag]):
        rows = slice(head * each, (head + 1) * each)
        ids[:, rows] = (-1, 2**31 - 1, -(2**31))[number % 3]
        counts[:, rows] = (0, 10**6, -7)[number % 3]
    return Selection(ids, counts, unit), wanted


def scored_part(case: Case, scored: Flags) -> Case:
    """The case with the scored heads only, as `expect_scores` wants it."""
    group = case.q.shape[1] // case.kv.kv_heads
    heads = [head for head, flag in enumerate(scored) if flag]
    return replace(
        case,
        kv=KVView(case.kv.k[:, :, heads], case.kv.v[:, :, heads], case.kv.rows),
        q=case.q[:, [head * group + each for head in heads for each in range(group)]],
        keys=[[row[head] for head in heads] for row in case.keys],
        values=[[row[head] for head in heads] for row in case.values],
    )


def flags(case: Case) -> st.SearchStrategy[Flags]:
    return st.tuples(*[st.booleans()] * case.kv.kv_heads)


def expect_hybrid(
    case: Case,
    sets: str,
    unit: int,
    dense: Flags,
    implementation: Implementation,
    *,
    pooling: Pooling | None = None,
    scored: Flags | None = None,
    seed: int = 0,
) -> None:
    """All of a cache by some heads, sets by the others, and scores of some of the first."""
    selection, wanted = choose_for_some(case, sets, unit, dense, seed)
    out, scores = hybrid_decode(
        case.q, case.kv, selection, dense, case.softmax, pooling=pooling, scored=scored, implementation=implementation
    )
    expect_attention(out, case, wanted)
    assert (scores is None) == (pooling is None)
    if scores is None or pooling is None:
        return
    kept = dense if scored is None else scored
    if any(kept):
        expect_scores(scores, scored_part(case, kept), pooling, ended=implementation != "triton")
    else:
        assert scores.shape == (len(case.lengths), 0, case.kv.rows.max_len)
        assert scores.dtype == torch.float32


def expect_everything(
    case: Case, implementation: Implementation, sets: str, unit: int, pooling: Pooling, dense: Flags
) -> None:
    """Attention to all tokens, to sets and to both, with the scores on the way, and the scores alone."""
    expect_dense(case, pooling, implementation)
    expect_scores(decode_scores(case.q, case.kv, pooling=pooling, implementation=implementation), case, pooling)
    expect_sparse(case, sets, unit, 3, 0, implementation)
    expect_hybrid(case, sets, unit, dense, implementation, pooling=pooling, seed=1)


def operations(case: Case, pooling: Pooling = "max") -> dict[str, Callable[[Implementation], Any]]:
    """Each operation that attends to a cache, to be called with an implementation."""
    selection, _ = choose(case, "kv", 1, 0, 0)
    given = case.q, case.kv
    dense = (True, *(False,) * (case.kv.kv_heads - 1))
    return {
        "attend": lambda how: dense_decode_scores(*given, case.softmax, pooling=pooling, implementation=how),
        "select": lambda how: sparse_decode(*given, selection, case.softmax, implementation=how),
        "both": lambda how: hybrid_decode(*given, selection, dense, case.softmax, pooling=pooling, implementation=how),
        "score": lambda how: decode_scores(*given, pooling=pooling, implementation=how),
    }


@every_attention_run
@fewer(12)
@given(st.data(), st.one_of(st.none(), poolings))
def test_all_tokens_match_the_oracle(run: Run, data: st.DataObject, pooling: Pooling | None) -> None:
    case = data.draw(run.cases())
    # The others mask scores before they scale them.
    scale = data.draw(st.sampled_from((0.125, 0.3, 0.0, -0.3) if run.implementation == "native" else (0.125, 0.3)))
    case = replace(case, softmax=replace(case.softmax, scale=scale))
    with run.chosen() as implementation:
        expect_dense(case, pooling, implementation)
        if pooling is not None:
            scores = decode_scores(case.q, case.kv, pooling=pooling, implementation=implementation)
            expect_scores(scores, case, pooling)


@every_attention_run
@fewer(12)
@given(st.data(), groupings, st.sampled_from((1, 4, 16, 24)), st.sampled_from((0, 3, 300)), seeds)
def test_sets_match_the_oracle(run: Run, data: st.DataObject, sets: str, unit: int, slack: int, seed: int) -> None:
    case = data.draw(run.cases())
    with run.chosen() as implementation:
        expect_sparse(case, sets, unit, slack, seed, implementation)


@every_attention_run
@fewer(12)
@given(st.data(), groupings, st.sampled_from((1, 4, 16)), st.one_of(st.none(), poolings), seeds)
def test_heads_that_differ_match_the_oracle(
    run: Run, data: st.DataObject, sets: str, unit: int, pooling: Pooling | None, seed: int
) -> None:
    case = data.draw(run.cases())
    dense, scored = data.draw(flags(case), label="dense"), None
    if data.draw(st.booleans(), label="some"):
        scored = tuple(pooling is not None and a and b for a, b in zip(dense, data.draw(flags(case)), strict=True))
    with run.chosen() as implementation:
        expect_hybrid(case, sets, unit, dense, implementation, pooling=pooling, scored=scored, seed=seed)


@fewer(12)
@given(st.data(), groupings, st.sampled_from((1, 16)), st.booleans(), seeds)
def test_whole_rows_and_rows_that_only_pad(data: st.DataObject, sets: str, unit: int, hybrid: bool, seed: int) -> None:
    """Of the two implementations that know them: on a CPU nobody chooses another than the reference."""
    implementation: Implementation = "triton" if INTERPRETED else "auto"
    case = data.draw(Run("reference").cases())
    some = st.lists(st.booleans(), min_size=len(case.lengths), max_size=len(case.lengths))
    whole, empty = data.draw(some, label="whole"), data.draw(some, label="empty")
    selection, tokens = choose(case, sets, unit, 3, seed)
    if INTERPRETED:
        gone = torch.tensor(empty)
        ids, counts = selection.ids.masked_fill(gone[:, None, None], -1), selection.counts.masked_fill(gone[:, None], 0)
        selection = replace(selection, ids=ids, counts=counts)
    # The reference reads something of every row, as its shapes follow from no length: only its result is none.
    other = with_other_rows(case, whole, empty, nowhere=INTERPRETED)
    given, how = (other.q, other.kv, selection), {"implementation": implementation}
    dense = data.draw(flags(case), label="dense") if hybrid else (False,) * case.kv.kv_heads
    if hybrid:
        out, _ = hybrid_decode(*given, dense, other.softmax, **how)
    else:
        workspace = Workspace.of(*case.q.shape[:2], case.q.device) if data.draw(st.booleans()) else None
        out = sparse_decode(*given, other.softmax, workspace=workspace, **how)
    expect_other_rows(out, other, tokens, whole, dense)


@fewer(12)
@given(st.data(), poolings)
def test_rows_that_only_pad_have_no_scores(data: st.DataObject, pooling: Pooling) -> None:
    implementation: Implementation = "triton" if INTERPRETED else "auto"
    case = data.draw(Run("reference").cases())
    count = len(case.lengths)
    empty = data.draw(st.lists(st.booleans(), min_size=count, max_size=count), label="empty")
    other = with_other_rows(case, [False] * count, empty, nowhere=INTERPRETED)
    out, scores = dense_decode_scores(other.q, other.kv, other.softmax, pooling=pooling, implementation=implementation)
    assert scores is not None
    expect_scores(scores, other, pooling, ended=False)
    expect_other_rows(out, other, everything(other), [True] * count, (True,) * case.kv.kv_heads)
