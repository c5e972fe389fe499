"""Attention over a chosen set against float64 loops."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_caches import Case, cases, int32, make_case
from kernel_checks import (
    attention_implementations,
    everything,
    expect_attention,
    expect_other_rows,
    fast_attention,
    takes,
    with_other_rows,
)

import oracles
from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import Selection


def choose(case: Case, sets: str, unit: int, slack: int, seed: int) -> tuple[Selection, list[list[list[int]]]]:
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


@given(
    cases(),
    attention_implementations,
    st.sampled_from(("all", "kv", "query")),
    st.sampled_from((1, 4, 16)),
    st.sampled_from((0, 3, 300)),
    st.integers(0, 2**31),
)
def test_sparse_decode_matches_the_oracle(
    case: Case, implementation: Implementation, sets: str, unit: int, slack: int, seed: int
) -> None:
    assume(takes(implementation, case))
    expect_sparse(case, sets, unit, slack, seed, implementation)


@given(cases(), attention_implementations, st.sampled_from((1, 16)))
def test_a_set_of_everything_is_dense_attention(case: Case, implementation: Implementation, unit: int) -> None:
    assume(takes(implementation, case))
    units = [-(-length // unit) for length in case.lengths]
    ids = [[[*range(count), *[-1] * (max(units) - count)]] for count in units]
    selection = Selection(int32(ids), int32(units)[:, None], unit)
    out = sparse_decode(case.q, case.kv, selection, case.softmax, implementation=implementation)
    expect_attention(out, case, everything(case))


@pytest.mark.parametrize("layout", ["buffer", "paged"])
@pytest.mark.parametrize("count", [512, 700])
@pytest.mark.parametrize("head_dim", [48, 128])
@pytest.mark.parametrize("implementation", fast_attention)
def test_sets_wide_enough_for_the_bfloat16_product(
    layout: str, count: int, head_dim: int, implementation: Implementation
) -> None:
    sizes = {"lengths": [900], "kv_heads": 2, "group": 2, "head_dim": head_dim}
    case = make_case(layout=layout, **sizes, dtype=torch.bfloat16, padding=7)
    chosen = sorted(random.Random(0).sample(range(900), count))
    selection = Selection(int32([[chosen]]), int32([[count]]))
    out = sparse_decode(case.q, case.kv, selection, case.softmax, implementation=implementation)
    expect_attention(out, case, [[chosen] * 4])


def test_an_explicit_implementation_never_falls_back() -> None:
    case = make_case(layout="strided", lengths=[9], kv_heads=2, group=2, head_dim=8)
    selection, tokens = choose(case, "kv", 1, 0, 0)
    with pytest.raises(KernelError, match="strides"):
        sparse_decode(case.q, case.kv, selection, case.softmax, implementation="cpu")
    expect_attention(sparse_decode(case.q, case.kv, selection, case.softmax), case, tokens)


def test_selections_that_do_not_fit_are_named() -> None:
    case = make_case(layout="buffer", lengths=[9], kv_heads=2, group=2, head_dim=8)
    ids, counts = torch.zeros(1, 2, 3, dtype=torch.int32), torch.ones(1, 2, dtype=torch.int32)
    with pytest.raises(KernelError, match="int32"):
        sparse_decode(case.q, case.kv, Selection(ids.long(), counts), case.softmax)
    with pytest.raises(KernelError, match="3 sets"):
        sparse_decode(case.q, case.kv, Selection(ids[:, [0, 1, 1]], counts[:, [0, 1, 1]]), case.softmax)
    with pytest.raises(KernelError, match="counts"):
        sparse_decode(case.q, case.kv, Selection(ids, counts[0]), case.softmax)
    with pytest.raises(KernelError, match="M >= 1"):
        sparse_decode(case.q, case.kv, Selection(ids[..., :0], counts), case.softmax)


@given(cases(), st.sampled_from(("all", "kv", "query")), st.sampled_from((1, 16)), st.integers(0, 2**31), st.data())
def test_whole_rows_and_rows_that_only_pad(case: Case, sets: str, unit: int, seed: int, data: st.DataObject) -> None:
    some = st.lists(st.booleans(), min_size=len(case.lengths), max_size=len(case.lengths))
    whole, empty = data.draw(some, label="whole"), data.draw(some, label="empty")
    selection, tokens = choose(case, sets, unit, 3, seed)
    other = with_other_rows(case, whole, [False] * len(empty))
    # The reference reads something of every row, as its shapes follow from no length: only its result is none.
    lengths = other.kv.rows.seq_lens.masked_fill(torch.tensor(empty), 0)
    rows = replace(other.kv.rows, seq_lens=lengths)
    other = replace(other, lengths=lengths.tolist(), kv=replace(other.kv, rows=rows))
    out = sparse_decode(other.q, other.kv, selection, other.softmax)
    expect_other_rows(out, other, tokens, whole, (False,) * case.kv.kv_heads)


@pytest.mark.parametrize("implementation", fast_attention)
def test_who_does_not_know_whole_rows_says_so(implementation: Implementation) -> None:
    case = with_other_rows(
        make_case(layout="buffer", lengths=[9], kv_heads=2, group=2, head_dim=16), whole=[True], empty=[False]
    )
    selection, _ = choose(case, "kv", 1, 0, 0)
    with pytest.raises(KernelError, match="whole"):
        sparse_decode(case.q, case.kv, selection, case.softmax, implementation=implementation)


def test_the_result_goes_where_it_is_wanted() -> None:
    case = make_case(layout="buffer", lengths=[9, 5], kv_heads=2, group=2, head_dim=16)
    selection, tokens = choose(case, "kv", 1, 0, 0)
    out = torch.full_like(case.q, torch.nan)
    assert sparse_decode(case.q, case.kv, selection, case.softmax, out=out) is out
    expect_attention(out, case, tokens)
    for wrong in (out[:1], out.double(), out.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(KernelError, match="out must be contiguous"):
            sparse_decode(case.q, case.kv, selection, case.softmax, out=wrong)
