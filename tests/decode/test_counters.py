"""What is counted of a step: sums of layers, of rows or of mean rows; padding and rows outside of the policy not."""

import pytest

from counting import used
from saccade.decode.counters import Counters


def test_layers_and_heads_of_a_step_are_counted_at_once() -> None:
    """Two layers, the second of two kinds of heads, over rows of 10 and 30 tokens."""
    by_row, of_mean = Counters(2, by_row=True), Counters(2)
    for counters in (by_row, of_mean):
        first = used(0, [10, 30])
        sparse = used(1, [10, 30], [[4, 6], [2, 8]], weight=0.75, overflowed=[[True, False], [False, False]])
        counters.add([first, used(1, [], weight=0.25, rows=first.rows), sparse])
    # Of the second layer: a quarter attends to all, the others to 5 of each row.
    tokens, share = 0.25 * 40 + 0.75 * 10, 0.25 * 2 + 0.75 * (5 / 10 + 5 / 30)
    assert by_row.totals()[0] == (40.0, 2.0, 0.0, 2.0)
    assert by_row.totals()[1] == pytest.approx((tokens, share, 0.75 * 0.5, 2.0))
    assert of_mean.totals()[0] == (20.0, 1.0, 0.0, 1.0)
    assert of_mean.totals()[1] == pytest.approx((tokens / 2, share / 2, 0.75 * 0.25, 1.0))


def test_pages_end_with_the_row() -> None:
    counters = Counters(1, by_row=True)
    counters.add([used(0, [33, 32], [[2], [2]], unit=16)])
    assert counters.totals() == [pytest.approx((17 + 32, 17 / 33 + 1, 0.0, 2.0))]


def test_rows_that_pad_or_are_whole_count_nothing() -> None:
    counters, alone = Counters(2, by_row=True), Counters(2, by_row=True)
    padded = used(0, [20, 0, 50, 0], [[5], [0], [9], [0]], whole=[False, False, True, False])
    counters.add([padded, used(1, [], rows=padded.rows)])
    one = used(0, [20], [[5]])
    alone.add([one, used(1, [], rows=one.rows)])
    assert counters.totals() == alone.totals() == [(5.0, 0.25, 0.0, 1.0), (20.0, 1.0, 0.0, 1.0)]


def test_a_step_of_padding_alone_is_none() -> None:
    for counters in (Counters(1), Counters(1, by_row=True)):
        counters.add([used(0, [0, 0], [[0], [0]])])
        counters.add([])
        assert counters.totals() == [(0.0, 0.0, 0.0, 0.0)]


def test_what_happens_undone_leaves_the_sums_where_they_are() -> None:
    counters = Counters(1)
    counters.add([used(0, [4])])
    (sums,) = counters._sums.values()
    with counters.undone():
        counters.add([used(0, [8], [[2]])])
    assert next(iter(counters._sums.values())) is sums
    assert counters.totals() == [(4.0, 1.0, 0.0, 1.0)]
