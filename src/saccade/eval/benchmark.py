"""Copies of benchmarks that people have run elsewhere: local files in the columns that kvpress reads.

Rows of `context, question, answer_prefix, answer, max_new_tokens`, as Parquet or JSON Lines; an answer is a text or a
list of them. Other columns are left alone but for `task` and `metric`, which say how a row is scored.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import DocumentError, SaccadeError, install
from .document import read_utf8
from .metrics import Metric, metric_of

COLUMNS = ("context", "question", "answer_prefix", "answer", "max_new_tokens")
SUFFIXES = (".jsonl", ".parquet")
MARK = "\ufdd0"
"""A character that is none: it shows where a chat template puts what follows a context."""


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """A row that passed every check.

    Attributes:
        name: what errors call it.
        answers: references, at least one, none empty.
        metric: how what is said is scored; None where nobody asked.
    """

    name: str
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    metric: Metric | None

    def score(self, said: str) -> float:
        """0 to 1, by the row's metric."""
        assert self.metric is not None, "asked for when the file was read"
        return self.metric(said, self.answers)


def read_rows(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The rows of a file of the user's, each with what errors call it.

    Raises:
        DocumentError: a file that cannot be read, is neither Parquet nor JSON Lines, or has no row.
        SaccadeError: a Parquet file without pyarrow.
    """
    name = f"task file {str(path)!r}"
    if path.suffix not in SUFFIXES:
        raise DocumentError(f"{name} is neither {' nor '.join(SUFFIXES)}")
    found = list(_parquet(path, name) if path.suffix == ".parquet" else _json_lines(path, name))
    if not found:
        raise DocumentError(f"{name} has no row")
    return found


def is_benchmark(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Whether rows have kvpress's columns; the user's own task files have the three others only."""
    return not {"answer_prefix", "max_new_tokens"}.isdisjoint(rows[0][1])


def benchmark_row(name: str, row: Mapping[str, Any], metric: str | None = None, *, scored: bool = True) -> BenchmarkRow:
    """Check a row of `read_rows`; `metric` goes before what it says, and none is looked for unless it is scored.

    Raises:
        DocumentError: a missing column, a value of another kind, an empty context or answer, or no known metric.
    """
    missing = [column for column in COLUMNS if column not in row]
    if missing:
        raise DocumentError(f"{name} has no column {missing[0]}; its columns: {', '.join(row)}")
    for column in COLUMNS[:3]:
        if not isinstance(row[column], str):
            raise DocumentError(f"{name}: {column}={row[column]!r} is no text")
        refuse_half_characters(name, column, row[column])
    if not row["context"].strip():
        raise DocumentError(f"{name}: context is empty")
    if not (row["question"] + row["answer_prefix"]).strip():
        raise DocumentError(f"{name}: question and answer_prefix are both empty")
    new = row["max_new_tokens"]
    if isinstance(new, bool) or not isinstance(new, int) or new < 1:
        raise DocumentError(f"{name}: max_new_tokens={new!r} is not valid; a whole number of at least 1")
    answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise DocumentError(f"{name}: answer={row['answer']!r} is not valid; a text or a list of texts, none empty")
    for answer in answers:
        refuse_half_characters(name, "answer", answer)
    chosen = metric_of(row, metric, name) if scored else None
    asked = {column: row[column] for column in COLUMNS[:3]}
    return BenchmarkRow(name, **asked, answers=tuple(answers), max_new_tokens=new, metric=chosen)


def refuse_half_characters(name: str, column: str, text: str) -> None:
    """Raise a DocumentError if a text cannot be encoded."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DocumentError(f"{name}: {column} holds half of a character pair, which is no text")


def framed(tokenizer: Any, context: str) -> tuple[str, str, bool]:
    """A context as the model's chat template begins it; what stands between question and answer; whether it is whole.

    Whole: the template has put what a text begins with. A model without a template gets a new line before the answer.
    """
    if not getattr(tokenizer, "chat_template", None):
        return context, "\n", False
    told = [{"role": "user", "content": context + MARK}]
    begun, mark, after = tokenizer.apply_chat_template(told, add_generation_prompt=True, tokenize=False).partition(MARK)
    if not mark:
        raise DocumentError("the model's chat template leaves out the end of a message")
    return begun, after, True


def _parquet(path: Path, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if find_spec("pyarrow") is None:
        raise SaccadeError(f"{name} needs pyarrow to be read: {install('benchmarks')}")
    import pyarrow
    from pyarrow.parquet import read_table

    try:
        with path.open("rb") as file:  # whose errors say why in words
            table = read_table(file)
    except OSError as error:
        said = error.strerror or "it is no whole Parquet file"
        raise DocumentError(f"{name} cannot be read: {said}") from None
    except pyarrow.ArrowException as error:
        raise DocumentError(f"{name} is not Parquet: {str(error).splitlines()[0]}") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{name}, row {number}", row


def _json_lines(path: Path, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # Not splitlines: JSON texts may hold other line separators.
    for number, text in enumerate(re.split(r"\r\n?|\n", read_utf8(path, name)), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DocumentError(f"{name}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DocumentError(f"{name}, line {number} is not an object")
        yield f"{name}, line {number}", row
