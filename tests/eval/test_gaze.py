"""Where a policy looks: bins and facts against sets made by hand."""

from __future__ import annotations

import pytest
import torch

from saccade.eval.gaze import BINS, GazeObserver
from saccade.eval.sheet import Row, Sheet
from saccade.plans.roles import HeadSpan
from saccade.types import KVView, Role, Rows, Selection, Softmax

LENGTH = 10 * BINS
SPAN = HeadSpan(0, 2, Role.REUSE)


def view(decoded: int = 3) -> KVView:
    cache = torch.zeros(1, LENGTH + decoded, 2, 4)
    return KVView(cache, cache, Rows.on_host(torch.zeros(1, 1, dtype=torch.int32), [0], [LENGTH + decoded]))


def selection(*sets: list[int], unit: int = 1) -> Selection:
    width = max(map(len, sets))
    ids = torch.tensor([[[*chosen, *[-1] * (width - len(chosen))] for chosen in sets]], dtype=torch.int32)
    return Selection(ids, (ids >= 0).sum(-1).int(), unit)


class Alone(GazeObserver):
    """Of one row, which answers from the document's end on; its fact lies at `span`."""

    def __init__(self, span: tuple[int, int] | None = (0, 1)) -> None:
        self.turn_to(Sheet((Row([5, 6], 1, span),), LENGTH))


def look(gaze: GazeObserver, chosen: Selection | None) -> None:
    gaze.observe(3, SPAN, torch.zeros(1, 4, 4), view(), chosen, Softmax(1.0))


def test_bins_count_sets_not_tokens() -> None:
    gaze = Alone()
    look(gaze, selection([0, 1, 2, 15], [5, LENGTH - 1, LENGTH + 1]))
    assert gaze.bins(0) == [1.0, 0.5, *[0.0] * (BINS - 3), 0.5]


def test_pages_touch_every_bin_they_reach_into() -> None:
    gaze = Alone()
    look(gaze, selection([1], unit=16))
    assert gaze.bins(0) == [0.0, 1.0, 1.0, 1.0, *[0.0] * (BINS - 4)]


def test_a_fact_is_held_by_the_sets_that_have_a_token_of_it() -> None:
    gaze = Alone((100, 102))
    look(gaze, selection([99, 102], [101, 400]))
    assert gaze.fact_held(0) == 0.5
    look(gaze, selection([100, 101]))
    assert gaze.fact_held(0) == pytest.approx(0.75)
    gaze.turn_to(gaze.sheet)
    assert gaze.fact_held(0) is None


def test_attending_to_everything_is_no_look() -> None:
    gaze = Alone()
    look(gaze, None)
    assert gaze.bins(0) is None
    assert gaze.fact_held(0) is None
