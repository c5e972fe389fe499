"""Benchmarks' files in kvpress's columns: what is read of them, how it is framed, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table

from harness.conftest import few_words
from one_line import lacking, refused, said
from saccade.errors import DocumentError, SaccadeError
from saccade.eval.benchmark import benchmark_row, framed, is_benchmark, read_rows
from saccade.eval.context import benchmark_contexts

ROW: dict[str, Any] = {
    "context": "Some text. The magic number is 4711. More text.",
    "question": "What is the magic number?",
    "answer_prefix": " The magic number is",
    "answer": ["4711"],
    "max_new_tokens": 6,
    "task": "niah_single_1",
}
ROWS = [ROW, {**ROW, "question": "And?", "answer": ["4711", "12"]}, {**ROW, "context": "Other.", "answer": ["7"]}]


def json_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def parquet(path: Path, rows: list[Any]) -> Path:
    write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def contexts(tokenizer: Any, path: Path, metric: str | None = None, limit: int = 99, **changed: int) -> Any:
    sizes = {"positions": 4096, "length": 2048, "seed": 1, **changed}
    return benchmark_contexts(tokenizer, path, metric=metric, limit=limit, **sizes)


def test_ruler_has_each_task_in_turn_and_what_is_asked_stands_in_the_text(tokenizer: Any) -> None:
    with few_words():
        found, count = contexts(tokenizer, Path("ruler"), limit=4)
    assert count == 4 and contexts(tokenizer, Path("ruler"), limit=4)[0] == found
    shapes = (r"\d{7}", r"[0-9a-f-]{36}", r"[A-Z]{5}(, [A-Z]{5}){4}", r"\d{7}")
    for (text, (asked,)), shape in zip(((one.tokens, one.questions) for one in found), shapes, strict=True):
        assert re.fullmatch(shape, asked.expected) and asked.expected.split(", ")[-1] in tokenizer.decode(text)
        assert asked.longest == (30 if "," in shape else 128) and len(text) + asked.longest <= 2048
    with pytest.raises(DocumentError, match="--context 2047: --task ruler takes at least 2048"):
        contexts(tokenizer, Path("ruler"), length=2047)


def test_both_kinds_of_file_are_read_alike_as_people_have_them(tokenizer: Any, tmp_path: Path) -> None:
    """With columns that nobody reads, a single answer as text, and a prefix that is empty, too."""
    lines, table = json_lines(tmp_path / "rows.jsonl", ROWS), parquet(tmp_path / "rows.parquet", ROWS)
    assert [row for _, row in read_rows(lines)] == [row for _, row in read_rows(table)] == ROWS
    assert contexts(tokenizer, lines) == contexts(tokenizer, table)
    row = {**ROW, "answer": "4711", "answer_prefix": "", "length": 9, "all_classes": None, "_id": "x"}
    (context,), _ = contexts(tokenizer, parquet(tmp_path / "rows.parquet", [row]))
    assert context.questions[0].score(" 4711") == 1


def test_rows_of_one_context_are_asked_together(tokenizer: Any, tmp_path: Path) -> None:
    (first, second), count = contexts(tokenizer, json_lines(tmp_path / "rows.jsonl", ROWS))
    assert count == 3 and tokenizer.decode(first.tokens).endswith(ROW["context"])
    assert [question.asked for question in first.questions] == ["What is the magic number?", "And?"]
    told = [tokenizer.decode(question.tokens) for question in first.questions]
    assert told == ["What is the magic number?\n The magic number is", "And?\n The magic number is"]
    assert [question.expected for question in first.questions] == ["4711", "4711, 12"]
    assert [question.score("It is 4711.") for question in first.questions] == [1.0, 0.5]
    assert [question.longest for question in second.questions] == [6]


def test_a_chat_template_stands_around_context_and_question(tokenizer: Any) -> None:
    class Chatting:
        chat_template = "there is one"

        def apply_chat_template(self, told: list[dict[str, str]], **options: Any) -> str:
            assert options == {"add_generation_prompt": True, "tokenize": False}
            return f"<s>[{told[0]['role']}]{told[0]['content']}[/user][assistant]"

    assert framed(Chatting(), "text") == ("<s>[user]text", "[/user][assistant]", True)
    assert framed(tokenizer, "text") == ("text", "\n", False)


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"context": None}, "context=None is no text"),
        ({"context": " "}, "context is empty"),
        ({"question": "", "answer_prefix": " "}, "question and answer_prefix are both empty"),
        ({"question": "\ud800"}, "question holds half of a character pair"),
        ({"answer": ""}, "answer='' is not valid; a text or a list of texts, none empty"),
        ({"answer": []}, "answer=[] is not valid"),
        ({"answer": ["a", ""]}, "answer=['a', ''] is not valid"),
        ({"answer": "\ud800"}, "answer holds half of a character pair"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is not valid; a whole number of at least 1"),
        ({"max_new_tokens": "12"}, "max_new_tokens='12' is not valid"),
        ({"max_new_tokens": True}, "max_new_tokens=True is not valid"),
        ({"task": "lsht"}, "no metric is known of task 'lsht'; give --metric"),
        ({"metric": "bleu"}, "unknown metric 'bleu'; valid: string_match_all, string_match_part"),
    ]
    path, lines = tmp_path / "rows.jsonl", []
    for changed, words in bad:
        rows = read_rows(json_lines(path, [ROW, {**ROW, **changed}]))
        line = said(DocumentError, lambda rows=rows: [benchmark_row(*row) for row in rows])
        lines.append((line, (f"task file {str(path)!r}, line 2", words)))
    assert lacking(lines) == []


@pytest.mark.parametrize("column", ["context", "max_new_tokens"])
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    rows = read_rows(parquet(tmp_path / "rows.parquet", [{k: v for k, v in ROW.items() if k != column}]))
    with refused(DocumentError, f"row 1 has no column {column}; its columns: ", "task"):
        benchmark_row(*rows[0])
    assert is_benchmark(rows)


def test_a_metric_on_the_command_line_goes_first(tmp_path: Path) -> None:
    (row,) = read_rows(
        json_lines(tmp_path / "rows.jsonl", [{**ROW, "answer": ["4711", "12"], "metric": "string_match_part"}])
    )
    assert benchmark_row(*row).score("4711") == 1
    assert benchmark_row(*row, "string_match_all").score("4711") == 0.5
    assert benchmark_row(*row, scored=False).metric is None
    with pytest.raises(DocumentError, match=r"^--metric: unknown metric 'bleu'"):
        benchmark_row(*row, "bleu")


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    with refused(DocumentError, f"^task file {re.escape(repr(str(path)))}.*cannot be read: No such file or directory"):
        read_rows(path)
    path.write_bytes(b"PAR1 and nothing else of it PAR1")
    with refused(DocumentError, f"^task file {re.escape(repr(str(path)))}.*(is not Parquet|cannot be read)"):
        read_rows(path)


def test_a_file_without_rows_or_of_another_kind_is_named_or_says_what_to_install(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DocumentError, match=r"has no row$"):
        read_rows(parquet(tmp_path / "rows.parquet", [ROW]) and json_lines(tmp_path / "rows.jsonl", []))
    own = json_lines(tmp_path / "own.jsonl", [{"context": "a", "question": "b", "answer": "c"}])
    with pytest.raises(DocumentError, match="line 1 has neither answer_prefix nor max_new_tokens"):
        contexts(tokenizer, own)
    monkeypatch.setattr("saccade.eval.benchmark.find_spec", lambda name: None)
    with pytest.raises(SaccadeError, match=r'needs pyarrow to be read: pip install "\.\[benchmarks\]"'):
        read_rows(parquet(tmp_path / "rows.parquet", ROWS))


def test_a_row_longer_than_the_model_is_named(tokenizer: Any, tmp_path: Path) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [ROW, {**ROW, "max_new_tokens": 4000}])
    with pytest.raises(DocumentError, match=r"line 2: \d+ tokens with its answer; the model has 2048 positions"):
        contexts(tokenizer, path, positions=2048)
    assert contexts(tokenizer, path, positions=2048, limit=1)[1] == 2
