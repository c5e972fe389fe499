"""Wilson intervals against the formula."""

from math import sqrt

import pytest

from saccade.eval.interval import wilson


@pytest.mark.parametrize(("right", "count"), [(0, 48), (1, 48), (24, 48), (48, 48), (3, 7)])
def test_wilson(right: int, count: int) -> None:
    z, share = 1.959963984540054, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    assert wilson(right, count) == pytest.approx((middle - half, middle + half), abs=1e-12)


def test_answers_right_in_part_reach_from_the_number_below_to_that_above() -> None:
    assert wilson(24.5, 48) == (wilson(24, 48)[0], wilson(25, 48)[1])
    assert wilson(0.3 + 0.6 + 0.1, 48) == wilson(1, 48)


def test_nothing_counted_is_anything_possible() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
