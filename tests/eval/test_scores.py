"""RULER's scores and Wilson intervals by hand, and what a policy's row adds up to: times, shares, recalls."""

from math import sqrt

import pytest
import torch

from counting import used
from saccade.decode.counters import Counters
from saccade.decode.recall import Recall
from saccade.decode.stats import Rectifications, RunStats
from saccade.eval.interval import wilson
from saccade.eval.metrics import METRICS, TASKS, metric_of
from saccade.eval.tally import Tally, recalls_of
from saccade.methods.policy import Policy


def test_scores_are_by_the_metric_that_a_row_or_its_task_says() -> None:
    for metric, said, references, score in (
        ("string_match_all", "They are ABCDE and fghij.", ["abcde", "FGHIJ"], 1.0),
        ("string_match_all", "only abcde", ["abcde", "fghij", "klmno", "pqrst"], 0.25),
        ("string_match_part", "only abcde", ["abcde", "fghij"], 1.0),
        ("string_match_part", "neither", ["abcde", "fghij"], 0.0),
    ):
        assert metric_of({"metric": metric, "task": "vt"}, None, "here")(said, references) == score, said
    assert set(TASKS.values()) == set(METRICS)
    assert metric_of({"task": "niah_single_1"}, None, "here") == METRICS["string_match_all"]
    assert metric_of({"task": "qa_2"}, "", "here") == METRICS["string_match_part"]


@pytest.mark.parametrize(("right", "count"), [(0, 48), (1, 48), (24, 48), (48, 48), (3, 7)])
def test_wilson(right: int, count: int) -> None:
    z, share = 1.959963984540054, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    assert wilson(right, count) == pytest.approx((middle - half, middle + half), abs=1e-12)


def test_what_is_right_in_part_reaches_from_the_number_below_to_that_above() -> None:
    assert wilson(24.5, 48) == (wilson(24, 48)[0], wilson(25, 48)[1])
    assert wilson(0.3 + 0.6 + 0.1, 48) == wilson(1, 48) and wilson(0, 0) == (0.0, 1.0)


def tally(spec: str) -> Tally:
    return Tally(Policy.from_spec(spec))


def test_a_rectified_token_costs_its_share_of_the_dense_pass() -> None:
    rectified = tally("resa:rectify=4")
    rectified.seconds += [0.01, 0.01, 0.5]
    assert rectified.row(0.02)["ms_per_token"] is None, "the pass was not timed yet"
    rectified.pass_seconds += [0.06, 0.06, 0.9]
    row = rectified.row(0.04)
    assert row["ms_per_token"] == pytest.approx(1e3 * (4 * 0.01 + 0.06) / 5)
    assert row["speedup"] == pytest.approx(2)
    plain = tally("quest")
    plain.seconds += [0.01, 0.02, 0.5]
    assert plain.row(0.04)["ms_per_token"] == pytest.approx(20)


def test_dense_passes_count_in_the_share() -> None:
    counters = Counters(1)
    for _ in range(8):
        counters.add([used(0, [100], [[10] * 4], overflowed=[[True, False, False, False]])])
    rectified = tally("resa:rectify=4")
    rectified.add_run(RunStats.of("resa", counters, None, index_bytes=7, build_seconds=1.0))
    assert rectified.row(None)["share_attended"] == pytest.approx(0.1)
    passes = Rectifications(passes=2, rewritten=8)
    rectified.add_run(RunStats.of("resa", counters, None, index_bytes=5, build_seconds=2.0, rectification=passes))
    row = rectified.row(None)
    assert row["share_attended"] == pytest.approx((16 * 0.1 + 2) / 18)
    assert row["overflow"] == pytest.approx(0.25)  # a dense pass has no sets
    assert (row["index_bytes"], row["build_seconds"]) == (7, 1.5)


def test_recalls_are_means_over_heads_with_a_set_if_there_are_any() -> None:
    records = Recall(
        torch.tensor([[[torch.nan, 0.5], [0.25, 0.75]], [[torch.nan, 0.0], [0.0, 1.0]]]),
        torch.tensor([[[torch.nan, 0.25], [0.0, 0.0]], [[torch.nan, 0.75], [0.0, 1.0]]]),
    )
    recalls = recalls_of(records, (0, 1))
    assert recalls == [[(0.5, 0.25, 0.5), (0.5, 0.0, 1.0)], [(0.0, 0.75, 0.5), (0.5, 0.5, 1.0)]]
    counted = tally("tidal")
    assert counted.row(None)["recall"] is counted.row(None)["token_recall"] is None
    for step in recalls:
        counted.add_answer(True, 4, None, [step])
    row = counted.row(None)
    assert (row["recall_per_layer"], row["token_recall_per_layer"]) == ([0.25, 0.5], [0.5, 0.25])
    assert row["heads_with_set_per_layer"] == [0.5, 1.0]
    assert (row["recall"], row["token_recall"]) == pytest.approx((1.25 / 3, 1 / 3))  # three heads of four
    assert (row["recall_with_dense"], row["token_recall_with_dense"]) == pytest.approx((0.5625, 0.5))
    recalls = recalls_of(Recall(*torch.full((2, 3, 2, 4), torch.nan)), (0, 1))
    counted = tally("dense")
    counted.add_answer(True, 4, None, recalls)
    row = counted.row(None)
    assert row["recall"] is row["token_recall"] is None and row["recall_per_layer"] == [None, None]
    assert row["recall_with_dense"] == row["token_recall_with_dense"] == 1.0
