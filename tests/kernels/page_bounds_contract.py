"""What every implementation of page bounds gives: of rows in a block each, or in blocks that a table names."""

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_budgets import largest_query, score_error
from kernel_caches import Case, int32, make_case
from kernel_checks import INTERPRETED, Run, every_implementation, every_index_run, fewer, poolings
from torch import Tensor

import oracles
from saccade.kernels._dispatch import Implementation
from saccade.kernels.page_bounds.api import page_scores, update_page_bounds
from saccade.types import KVView, Pooling, Rows

NOWHERE = 10**6
pages = st.sampled_from((1, 3, 16, 40))
per_blocks = st.sampled_from((None, None, 1, 2, 3, 8))
"""Pages of a block; None: a row has a block of its own."""


@dataclass(frozen=True, repr=False)
class Bounds:
    """Bounds of a case, NaN in whatever no page has been written to.

    Attributes:
        lower, upper: `[blocks, Hkv, P, d]`.
        table: `[B, n]`; entries that a row does not need point nowhere. None: block b is row b's.
    """

    lower: Tensor
    upper: Tensor
    table: Tensor | None = None

    def update(
        self, kv: KVView, page: int, starts: list[int], count: int, implementation: Implementation = "auto", **how: Any
    ) -> None:
        start = int32(starts, self.lower.device)
        given: Any = {"page": page, "start": start, "count": count, "table": self.table, **how}
        update_page_bounds(self.lower, self.upper, kv, **given, implementation=implementation)

    def scores(self, case: Case, page: int, implementation: Implementation = "auto", **others: Any) -> Tensor:
        return self.scored(case, page, implementation, **others)[0]

    def scored(
        self, case: Case, page: int, implementation: Implementation = "auto", **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        """What `page_scores` says of the case; `max` of a group unless another pooling is asked for."""
        others = {"pooling": "max", "table": self.table, "implementation": implementation, **others}
        return page_scores(case.q, self.lower, self.upper, case.kv.rows.seq_lens, page=page, **others)

    def place(self, row: int, number: int) -> tuple[int, slice, int]:
        """Where the bounds of all heads of a row's page lie."""
        if self.table is None:
            return row, slice(None), number
        per_block = self.lower.shape[2]
        return int(self.table[row, number // per_block]), slice(None), number % per_block


def bounds_of(case: Case, page: int, per_block: int | None = None, spare: int = 2) -> Bounds:
    """Empty bounds for all pages of a case: with pages to spare, or in shuffled blocks, two of which are nobody's.

    Blocks lie side by side, with room between them.
    """
    kv = case.kv
    if per_block is None:
        shape = (2, len(case.lengths), kv.kv_heads, -(-kv.rows.max_len // page) + spare, kv.head_dim)
        return Bounds(*torch.full(shape, torch.nan, device=kv.k.device).to(kv.k.dtype))
    needed = [-(-length // (page * per_block)) for length in case.lengths]
    numbers = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(0)).tolist()
    table = int32([[NOWHERE] * (-(-kv.rows.max_len // (page * per_block)) + 1)] * len(needed))
    for row, count in enumerate(needed):
        table[row, :count] = int32([numbers.pop() for _ in range(count)])
    shape = (sum(needed) + 2, kv.kv_heads + 1, per_block, 2 * kv.head_dim)
    both = torch.full(shape, torch.nan, device=kv.k.device).to(kv.k.dtype)[:, : kv.kv_heads]
    return Bounds(both[..., : kv.head_dim], both[..., kv.head_dim :], table.to(kv.k.device))


def factors(case: Case) -> Tensor:
    """What a head's stored keys are multiplied with, `[Hkv, 1]` in float64."""
    scale = torch.ones(1) if case.kv.k_scale is None else case.kv.k_scale
    return scale.double().cpu().expand(case.kv.kv_heads)[:, None]


def filled(bounds: Bounds, case: Case, page: int) -> Bounds:
    """The same with the bounds of all tokens, by the oracle."""
    for row, heads in enumerate(case.keys):
        for number, sides in enumerate(zip(*(oracles.page_bounds(keys, page) for keys in heads), strict=True)):
            for side, values in zip((bounds.lower, bounds.upper), np.array(sides).swapaxes(0, 1), strict=True):
                side[bounds.place(row, number)] = (torch.tensor(values) / factors(case)).to(side)
    return bounds


def expect_update(
    case: Case,
    bounds: Bounds,
    page: int,
    starts: list[int],
    count: int,
    implementation: Implementation,
    *,
    until_full: bool = False,
) -> None:
    """Update empty bounds: touched pages are right, all other memory holds what it held.

    Those of 8 bits are, times the scale, the smallest and largest numbers themselves.
    """
    bounds.update(case.kv, page, starts, count, implementation, filled=until_full)
    written = 0
    for row, (start, length) in enumerate(zip(starts, case.lengths, strict=True)):
        stop = min(start + count, length // page * page if until_full else length)
        touched = {position // page for position in range(max(start, 0), stop)}
        written += len(touched) * case.kv.kv_heads * case.kv.head_dim
        expected = [oracles.page_bounds(keys, page) for keys in case.keys[row]]
        for number in touched:
            place = bounds.place(row, number)
            sides = ((side[place].double().cpu() * factors(case)).tolist() for side in (bounds.lower, bounds.upper))
            assert list(zip(*sides, strict=True)) == [head[number] for head in expected]
    for side in (bounds.lower, bounds.upper):
        assert int((~side.float().isnan()).sum()) == written


def expect_page_scores(scores: Tensor, case: Case, page: int, count: int, pooling: Pooling) -> None:
    """Of `count` pages a row, within the budget."""
    group = case.q.shape[1] // case.kv.kv_heads
    heads = case.q.shape[1] if pooling == "each" else case.kv.kv_heads
    assert scores.dtype == torch.float32
    assert scores.shape == (len(case.lengths), heads, count)
    for row in range(len(case.lengths)):
        queries, keys = case.queries[row], case.keys[row]
        for index, expected in enumerate(oracles.page_scores(queries, keys, page, pooling)):
            head = index // group if pooling == "each" else index
            largest = largest_query(queries[head * group : (head + 1) * group])
            # Two products over the same components: each component counts at its larger bound, twice.
            extreme = np.abs(oracles.page_bounds(keys[head], page)).max(1)[:count]
            errors = score_error(largest * 2, np.tile(extreme, 2), group)
            got = scores[row, index, : len(errors)].double().cpu().numpy()
            assert (np.abs(got - expected[: len(errors)]) <= errors).all()


@every_index_run
@fewer(25)
@given(st.data(), pages, per_blocks, st.booleans())
def test_only_touched_pages_are_recomputed(
    run: Run, data: st.DataObject, page: int, per_block: int | None, until_full: bool
) -> None:
    case = data.draw(run.cases())
    starts = [data.draw(st.integers(-2, case.kv.rows.max_len + page)) for _ in case.lengths]
    count = data.draw(st.integers(0, case.kv.rows.max_len))
    with run.chosen() as implementation:
        bounds = bounds_of(case, page, per_block)
        expect_update(case, bounds, page, starts, count, implementation, until_full=until_full)


@every_implementation
def test_rows_that_share_a_block(implementation: Implementation) -> None:
    """One row touches the page that is the other's last and which that one does not touch."""
    case = make_case(lengths=[8, 8], kv_heads=1, group=1)
    kv = KVView(case.kv.k, case.kv.v, Rows.on_host(case.kv.rows.page_table[:1].repeat(3, 1), [0] * 3, [8] * 3))
    for row in range(3):
        bounds = Bounds(*torch.full((2, 2, 1, 2, 16), torch.nan), int32([1, 1, 1])[:, None])
        bounds.update(kv, 4, [7 if one == row else 8 for one in range(3)], 1, implementation)
        found = bounds.lower[1, 0, 1].tolist(), bounds.upper[1, 0, 1].tolist()
        assert found == oracles.page_bounds(case.keys[0][0], 4)[1]
        assert bounds.lower[1, 0, 0].isnan().all() and bounds.lower[0].isnan().all()


@every_index_run
@fewer(25)
@given(st.data(), pages, per_blocks, poolings, st.sampled_from((-1, 0, 1, None)))
def test_page_scores_match_the_oracle(
    run: Run, data: st.DataObject, page: int, per_block: int | None, pooling: Pooling, more: int | None
) -> None:
    case = data.draw(run.cases())
    bounds = filled(bounds_of(case, page, per_block), case, page)
    room = bounds.lower.shape[2] if bounds.table is None else bounds.table.shape[1] * bounds.lower.shape[2]
    # One fewer than the longest row has, as many, one more, or all that there is room for.
    wanted = room if more is None else min(-(-max(case.lengths) // page) + more, room)
    with run.chosen() as implementation:
        scores = bounds.scores(case, page, implementation, pooling=pooling, pages=None if more is None else wanted)
    expect_page_scores(scores, case, page, wanted, pooling)


@every_implementation
def test_a_search_bounds_pages_that_are_full(implementation: Implementation) -> None:
    """Of rows whose latest token has filled one, and no other; what was bounded before is scored as it was."""
    case = make_case(layout="paged", lengths=[16, 15, 13, 4, 1], group=3, padding=1)
    for per_block in (None, 2):
        bounds, wanted = (bounds_of(case, 4, per_block) for _ in range(2))
        for one in (bounds, wanted):
            one.update(case.kv, 4, [0] * 5, 12, implementation, filled=True)
        wanted.update(case.kv, 4, [15, 14, 12, 3, 0], 1, implementation, filled=True)
        scores = bounds.scores(case, 4, implementation, filling=case.kv)
        for side, other in ((bounds.lower, wanted.lower), (bounds.upper, wanted.upper)):
            assert torch.equal(side.nan_to_num(7.5), other.nan_to_num(7.5))
        told = wanted.scores(case, 4, implementation)
        for row, full in enumerate((3, 3, 3, 0, 0)):
            assert torch.equal(scores[row, :, :full], told[row, :, :full])


@every_implementation
def test_a_row_may_have_no_page(implementation: Implementation) -> None:
    """Nothing of its bounds is read, nor what a table says of it."""
    for per_block in (None, 2):
        case = make_case(lengths=[20, 9])
        bounds = filled(bounds_of(case, 4, per_block), case, 4)
        case.kv.rows.seq_lens[0] = 0
        if bounds.table is None:
            bounds.lower[0], bounds.upper[0] = torch.nan, torch.nan
        else:
            bounds.table[0] = NOWHERE
        assert bounds.scores(case, 4, implementation, pages=5)[1, :, :3].isfinite().all()


@every_index_run
def test_a_query_that_is_no_number_does_not_pass_for_one(run: Run) -> None:
    # In C the largest of a group is that of its numbers.
    poolings: tuple[Pooling, ...] = ("mean", "each") if run.implementation == "native" else get_args(Pooling)
    for pooling in poolings:
        for dtype in (torch.float32, torch.float16 if INTERPRETED else torch.bfloat16):
            case = make_case(lengths=[9], group=3, dtype=dtype)
            bounds = filled(bounds_of(case, 4), case, 4)
            case.q[0, 1, 3] = torch.nan
            with run.chosen() as implementation:
                broken = bounds.scores(case, 4, implementation, pooling=pooling)[0, :, :3].isnan()
            assert broken[1 if pooling == "each" else 0].all() and broken.sum() == 3


@every_implementation
def test_every_start_and_count(implementation: Implementation) -> None:
    case = make_case(layout="paged", lengths=[9, 7], kv_heads=1, group=1, padding=1)
    for page, per_block in ((2, 2),) if INTERPRETED else ((1, None), (2, None), (3, None), (4, None), (2, 2), (3, 1)):
        for start in range(11):
            for count in (0, 1, 2, 3, 4, 7, 10):
                bounds, starts = bounds_of(case, page, per_block), [start, max(start - 2, 0)]
                expect_update(case, bounds, page, starts, count, implementation, until_full=count % 2 == 1)
