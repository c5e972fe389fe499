"""RULER's scores against values worked out by hand."""

import pytest

from saccade.errors import DocumentError
from saccade.eval.metrics import METRICS, TASKS, metric_of


@pytest.mark.parametrize(
    ("metric", "said", "references", "score"),
    [
        ("string_match_all", "They are ABCDE and fghij.", ["abcde", "FGHIJ"], 1.0),
        ("string_match_all", "only abcde", ["abcde", "fghij", "klmno", "pqrst"], 0.25),
        ("string_match_part", "only abcde", ["abcde", "fghij"], 1.0),
        ("string_match_part", "neither", ["abcde", "fghij"], 0.0),
    ],
)
def test_scores(metric: str, said: str, references: list[str], score: float) -> None:
    assert metric_of({"metric": metric, "task": "vt"}, None, "here")(said, references) == score


def test_a_task_says_its_metric() -> None:
    assert set(TASKS.values()) == set(METRICS)
    assert metric_of({"task": "niah_single_1"}, None, "here") == METRICS["string_match_all"]
    assert metric_of({"task": "qa_2"}, "", "here") == METRICS["string_match_part"]


def test_unknown_names_are_refused_with_the_list() -> None:
    valid = r"^here: unknown metric 'bleu'; valid: string_match_all, string_match_part$"
    with pytest.raises(DocumentError, match=valid):
        metric_of({"metric": "bleu"}, None, "here")
    with pytest.raises(DocumentError, match=r"^here: no metric is known of task 'lsht'; give --metric .*niah_single_1"):
        metric_of({"task": "lsht"}, None, "here")
