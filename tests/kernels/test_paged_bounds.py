"""Page bounds that lie in blocks which a table names, as the cache of a serving engine keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_caches import Case, cases, int32, make_case
from kernel_checks import every_index, fast_index, index_implementations, poolings, takes, threads
from test_page_bounds import expect_page_scores, scores_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import oracles
from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels._native import library as native
from saccade.kernels.page_bounds.api import page_scores, update_page_bounds
from saccade.selection.index import NewTokens
from saccade.selection.scorers.page_bounds import PageBounds, PageBoundScorer
from saccade.types import KVView, Pooling, Rows

NOWHERE = 10**6


@dataclass(frozen=True, repr=False)
class Blocks:
    """Bounds of a case in shuffled blocks, NaN in whatever no page has been written to.

    Attributes:
        lower, upper: `[blocks, Hkv, P, d]`, side by side and with room between blocks.
        table: `[B, n]`; entries that a row does not need point nowhere.
    """

    lower: Tensor
    upper: Tensor
    table: Tensor

    def scores(self, case: Case, page: int, implementation: Implementation, **others: Any) -> Tensor:
        """What `page_scores` says of the case."""
        return scores_of(case, (self.lower, self.upper), page, implementation, **{"table": self.table, **others})

    def place(self, row: int, number: int) -> tuple[list[list[float]], list[list[float]]]:
        """Lower and upper bounds `[Hkv][d]` of a row's page."""
        block, inside = self.table[row, number // self.lower.shape[2]], number % self.lower.shape[2]
        return self.lower[block, :, inside].tolist(), self.upper[block, :, inside].tolist()


def scattered(case: Case, page: int, per_block: int, seed: int = 0) -> Blocks:
    """Empty blocks for all pages of a case, and two that belong to nobody."""
    random = torch.Generator().manual_seed(seed)
    needed = [-(-length // (page * per_block)) for length in case.lengths]
    width = -(-case.kv.rows.max_len // (page * per_block)) + 1
    numbers = torch.randperm(sum(needed) + 2, generator=random).tolist()
    table = torch.full((len(needed), width), NOWHERE, dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([numbers.pop() for _ in range(count)])
    shape = (sum(needed) + 2, case.kv.kv_heads + 1, per_block, 2 * case.kv.head_dim)
    both = torch.full(shape, torch.nan, dtype=case.kv.k.dtype)[:, : case.kv.kv_heads]
    return Blocks(both[..., : case.kv.head_dim], both[..., case.kv.head_dim :], table)


def expect_update(
    case: Case, blocks: Blocks, page: int, starts: list[int], count: int, implementation: Implementation
) -> None:
    """Update fresh bounds: touched pages are right, all other memory holds what it held."""
    given: Any = {"page": page, "start": int32(starts), "count": count, "table": blocks.table}
    update_page_bounds(blocks.lower, blocks.upper, case.kv, **given, implementation=implementation)
    written = 0
    for row, (start, length) in enumerate(zip(starts, case.lengths, strict=True)):
        touched = {position // page for position in range(start, min(start + count, length))}
        written += len(touched) * case.kv.kv_heads * case.kv.head_dim
        expected = [oracles.page_bounds(keys, page) for keys in case.keys[row]]
        for number in touched:
            lower, upper = blocks.place(row, number)
            assert list(zip(lower, upper, strict=True)) == [head[number] for head in expected]
    assert int(blocks.lower.isfinite().sum()) == int(blocks.upper.isfinite().sum()) == written


per_blocks = st.sampled_from((1, 2, 3, 8))
pages = st.sampled_from((1, 3, 16))


@given(cases(), index_implementations, pages, per_blocks, st.data())
def test_only_touched_pages_are_recomputed(
    case: Case, implementation: Implementation, page: int, per_block: int, data: st.DataObject
) -> None:
    assume(takes(implementation, case))
    starts = [data.draw(st.integers(0, case.kv.rows.max_len + page)) for _ in case.lengths]
    count = data.draw(st.integers(0, case.kv.rows.max_len))
    expect_update(case, scattered(case, page, per_block), page, starts, count, implementation)


@pytest.mark.parametrize("implementation", every_index)
def test_every_start_and_count(implementation: Implementation) -> None:
    case = make_case(layout="paged", lengths=[9, 7], kv_heads=1, group=1, head_dim=16, padding=1)
    for page, per_block in ((1, 2), (2, 2), (3, 1)):
        for start in range(11):
            for count in range(11):
                blocks = scattered(case, page, per_block)
                expect_update(case, blocks, page, [start, max(start - 2, 0)], count, implementation)


@pytest.mark.parametrize("implementation", every_index)
def test_rows_that_share_a_block(implementation: Implementation) -> None:
    """One row touches the page that is the other's last and which that one does not touch."""
    case = make_case(layout="buffer", lengths=[8, 8], kv_heads=1, group=1, head_dim=16)
    kv = KVView(case.kv.k, case.kv.v, Rows.on_host(case.kv.rows.page_table[:1].repeat(3, 1), [0] * 3, [8] * 3))
    for row in range(3):
        lower, upper = torch.full((2, 2, 1, 2, 16), torch.nan)
        start = int32([8, 8, 8])
        start[row] = 7
        table = int32([1, 1, 1])[:, None]
        update_page_bounds(lower, upper, kv, page=4, start=start, count=1, table=table, implementation=implementation)
        assert (lower[1, 0, 1].tolist(), upper[1, 0, 1].tolist()) == oracles.page_bounds(case.keys[0][0], 4)[1]
        assert lower[1, 0, 0].isnan().all() and lower[0].isnan().all()


def filled(case: Case, page: int, per_block: int) -> Blocks:
    """The bounds of all tokens, by the oracle."""
    blocks = scattered(case, page, per_block)
    for row, heads in enumerate(case.keys):
        for head, keys in enumerate(heads):
            for number, sides in enumerate(oracles.page_bounds(keys, page)):
                place = (blocks.table[row, number // per_block], head, number % per_block)
                blocks.lower[place], blocks.upper[place] = torch.tensor(sides[0]), torch.tensor(sides[1])
    return blocks


@given(cases(), index_implementations, pages, per_blocks, poolings, st.sampled_from((-1, 0, 1, None)))
def test_page_scores_match_the_oracle(
    case: Case, implementation: Implementation, page: int, per_block: int, pooling: Pooling, more: int | None
) -> None:
    assume(implementation != "native" or (case.kv.k.dtype != torch.float16 and case.kv.head_dim % 16 == 0))
    blocks = filled(case, page, per_block)
    room = blocks.table.shape[1] * per_block
    # One fewer than the longest row has, as many, one more, or all that there is room for.
    wanted = None if more is None else min(-(-max(case.lengths) // page) + more, room)
    scores = blocks.scores(case, page, implementation, pooling=pooling, pages=wanted)
    assert scores.shape[2] == (room if wanted is None else wanted)
    expect_page_scores(scores, case, page, scores.shape[2], pooling)


@pytest.mark.parametrize("implementation", every_index)
@pytest.mark.parametrize("more", [-2, 0])
def test_fewer_pages_than_there_is_room_for_without_a_table(more: int, implementation: Implementation) -> None:
    case = make_case(layout="buffer", lengths=[37, 20], kv_heads=2, group=2, head_dim=16)
    lower, upper = torch.full((2, 2, 2, 12, 16), torch.nan)
    update_page_bounds(lower, upper, case.kv, page=4, start=int32([0, 0]), count=37)
    scores = scores_of(case, (lower, upper), 4, implementation, pages=10 + more)
    expect_page_scores(scores, case, 4, 10 + more, "max")


@pytest.mark.parametrize("implementation", every_index)
def test_a_row_may_have_no_page(implementation: Implementation) -> None:
    """Its table says nothing, and nothing is read through it."""
    case = make_case(layout="buffer", lengths=[20, 9], kv_heads=2, group=2, head_dim=16)
    blocks = filled(case, 4, 2)
    blocks.table[0] = NOWHERE
    case.kv.rows.seq_lens[0] = 0
    scores = blocks.scores(case, 4, implementation, pages=5)
    assert scores[1, :, :3].isfinite().all()


@pytest.mark.skipif("native" not in fast_index, reason="no library was built")
@pytest.mark.parametrize("entry", [-1, 7, NOWHERE])
def test_blocks_outside_the_storage_are_refused(entry: int) -> None:
    case = make_case(layout="buffer", lengths=[40], kv_heads=1, group=2, head_dim=16)
    blocks = filled(case, 4, 2)
    assert blocks.lower.shape[0] == 7
    blocks.table[0, 4] = entry
    with pytest.raises(KernelError, match="page lies outside the storage"):
        blocks.scores(case, 4, "native")


def test_arguments_that_do_not_fit_are_named() -> None:
    case = make_case(layout="buffer", lengths=[40, 9], kv_heads=1, group=2, head_dim=4)
    blocks = filled(case, 4, 2)
    lower, upper, lengths = blocks.lower, blocks.upper, case.kv.rows.seq_lens
    wrong = [
        (blocks.table.long(), None, "int32"),
        (blocks.table[:1], None, r"table must be \[2, n\]"),
        (blocks.table[0], None, r"table must be \[2, n\]"),
        (None, None, "without a table 2 rows"),
        (blocks.table, 13, "13 pages are wanted, there is room for 12"),
        (blocks.table, -1, "-1 pages"),
    ]
    for table, count, words in wrong:
        with pytest.raises(KernelError, match=words):
            page_scores(case.q, lower, upper, lengths, page=4, pooling="max", table=table, pages=count)
        if count is None:
            with pytest.raises(KernelError, match=words):
                update_page_bounds(lower, upper, case.kv, page=4, start=int32([0, 0]), count=1, table=table)
    with pytest.raises(KernelError, match="8 pages of 4 cannot hold 40"):
        update_page_bounds(lower, upper, case.kv, page=4, start=int32([0, 0]), count=1, table=blocks.table[:, :4])


def test_the_index_of_a_scorer_follows_its_table() -> None:
    """Updated, scored, narrowed to heads and reordered through the table; its memory is never copied."""
    case = make_case(layout="buffer", lengths=[37, 20], kv_heads=2, group=2, head_dim=16)
    blocks = scattered(case, 4, 2)
    index = PageBounds(blocks.lower, blocks.upper, 4, blocks.table)
    scorer = PageBoundScorer(4)
    index.update(case.kv, NewTokens(case.kv.rows, 37))
    expect_page_scores(scorer.score(case.q, case.kv, index), case, 4, 10, "max")
    narrow = index.heads(1, 2)
    one = scorer.score(case.q[:, 2:], case.kv.heads(1, 2), narrow)
    assert torch.equal(one, scorer.score(case.q, case.kv, index)[:, 1:])
    swap = torch.tensor([1, 0])
    wanted = scorer.score(case.q, case.kv, index)[swap]
    index.permute(swap)
    rows = case.kv.rows
    turned = KVView(
        case.kv.k, case.kv.v, Rows(rows.page_table[swap], rows.row_start[swap], rows.seq_lens[swap], rows.max_len)
    )
    assert torch.equal(scorer.score(case.q[swap], turned, index), wanted)
    index.reserve(10**6)
    assert index.lower is blocks.lower and index.upper is blocks.upper


def test_the_reference_does_not_synchronise_with_the_host() -> None:
    with FakeTensorMode():
        zeros = torch.zeros(2, dtype=torch.int32)
        kv = KVView(
            torch.empty(6, 16, 2, 8), torch.empty(6, 16, 2, 8), Rows(zeros[:, None].expand(-1, 3), zeros, zeros + 1, 40)
        )
        lower, upper = torch.empty(6, 2, 2, 8), torch.empty(6, 2, 2, 8)
        given: Any = {"page": 8, "table": zeros[:, None].expand(-1, 3), "implementation": "reference"}
        update_page_bounds(lower, upper, kv, start=zeros, count=17, **given)
        scores = page_scores(torch.empty(2, 4, 8), lower, upper, zeros, pooling="max", pages=5, **given)
        assert scores.shape == (2, 2, 5)


@pytest.mark.skipif("native" not in fast_index, reason="no library was built")
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_pages(dtype: torch.dtype, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are looked up at a time, in every width; two threads share them and change nothing."""
    monkeypatch.setattr(native, "widest", lanes)
    case = make_case(layout="buffer", lengths=[900, 266], kv_heads=3, group=5, head_dim=96, dtype=dtype)
    blocks = filled(case, 2, 3)
    scores = []
    for count in (1, 2):
        with threads(count):
            scores.append(blocks.scores(case, 2, "native", pages=450))
    expect_page_scores(scores[0], case, 2, 450, "max")
    assert torch.equal(scores[0], scores[1])
