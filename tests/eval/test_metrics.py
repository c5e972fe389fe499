"""Benchmarks' metrics against values worked out by hand from their own code's rules."""

from __future__ import annotations

import pytest

from saccade.errors import DocumentError, SaccadeError
from saccade.eval.metrics import METRICS, TASKS, metric_of, metric_of_task


@pytest.mark.parametrize(
    ("metric", "said", "references", "score"),
    [
        ("string_match_all", "They are ABCDE and fghij.", ["abcde", "FGHIJ"], 1.0),
        ("string_match_all", "only abcde", ["abcde", "fghij", "klmno", "pqrst"], 0.25),
        ("string_match_part", "only abcde", ["abcde", "fghij"], 1.0),
        ("string_match_part", "neither", ["abcde", "fghij"], 0.0),
        ("qa_f1", "The Eiffel Tower!", ["eiffel tower"], 1.0),
        ("qa_f1", "the tall Eiffel Tower", ["Eiffel Tower", "Paris"], 0.8),  # precision 2/3, recall 1
        ("qa_f1", "nothing", ["Paris"], 0.0),
        ("qa_f1", "", ["the"], 0.0),
        ("rouge", "a b c d", ["a c d e"], 0.75),
        ("rouge", "x", ["a"], 0.0),
        ("retrieval", "Paragraph 12", ["Paragraph 12"], 1.0),
        ("retrieval", "Paragraph 12 or 3", ["Paragraph 12"], 0.5),
        ("retrieval", "none", ["Paragraph 12"], 0.0),
        ("count", "There are 7, or 7 or 8.", ["7"], 2 / 3),
        ("code_similarity", "\n# a comment\nreturn x + 1\nelse", ["return x + 1"], 1.0),
        ("code_similarity", "abcd", ["abxd"], 0.75),
        ("exact", "The answer.", ["Answer"], 1.0),
        ("exact", "The answer is", ["Answer"], 0.0),
        ("first_number", "It is 71432, not 5", ["71432"], 1.0),
        ("first_number", "It is 714321", ["71432"], 0.0),
        ("first_number", "none", ["71432"], 0.0),
        ("word", '"a1b2": c3', ["a1b2"], 1.0),
        ("word", "a1b2c3", ["a1b2"], 0.0),
        ("choice", "The answer is B.", ["B", "the cat"], 1.0),
        ("choice", "the cat", ["B", "the cat"], 1.0),
        ("choice", "A or B", ["B", "the cat"], 0.0),
    ],
)
def test_scores(metric: str, said: str, references: list[str], score: float) -> None:
    assert metric_of(metric, "here")(said, references) == pytest.approx(score)


def test_classes_share_a_point_but_for_those_that_the_right_one_holds() -> None:
    classes = ["Date", "Birth date", "Other number"]
    score = metric_of("classification", "here")
    assert score("Birth date", ["Birth date"], ["date", "Birth date", "Other number"]) == 1
    assert score("Date, or Other number", ["Date"], classes) == 0.5
    assert score("Other number", ["Date"], classes) == 0


def test_a_task_says_its_metric() -> None:
    assert set(TASKS.values()) <= set(METRICS)
    assert metric_of_task("niah_single_1", "here") == METRICS["string_match_all"]
    assert metric_of_task("hotpotqa_e", "here") == METRICS["qa_f1"]
    first_line = metric_of_task("triviaqa", "here")
    assert first_line("\nParis\nQuestion: Where?", ["Paris"]) == 1
    assert metric_of_task("hotpotqa", "here")("\nParis\nQuestion: Where?", ["Paris"]) < 1


def test_unknown_names_are_refused_with_the_list() -> None:
    with pytest.raises(DocumentError, match=r"^here: unknown metric 'bleu'; valid: string_match_all, .*choice$"):
        metric_of("bleu", "here")
    with pytest.raises(DocumentError, match=r"^here: no metric is known of task 'lsht'; give --metric .*niah_single_1"):
        metric_of_task("lsht", "here")


def test_a_metric_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.eval.metrics.find_spec", lambda name: None)
    assert metric_of("qa_f1", "here") is METRICS["qa_f1"]
    with pytest.raises(SaccadeError, match=r'^metric rouge needs rouge_score: pip install "\.\[benchmarks\]"'):
        metric_of("rouge", "here")
