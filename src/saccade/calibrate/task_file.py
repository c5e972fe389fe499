"""Tasks of the user's own: a JSON Lines file of texts, questions and answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import DocumentError
from ..eval.benchmark import (
    COLUMNS,
    BenchmarkRow,
    benchmark_rows,
    framed,
    is_benchmark,
    read_rows,
    refuse_half_characters,
)
from ..eval.tokens import TokenizedText, encode
from .problems import Ask, Problem, refuse_too_long

KEYS = ("context", "question", "answer")
PROMPT = "\n\nQuestion: {}\nAnswer:"


class FileProblems:
    """The problems of a file: each line an object of `context`, `question` and `answer`; lines of one context make one.
    A benchmark's rows, which `eval.benchmark` reads, are problems too.

    Args:
        positions: what the model has.
        together: all questions of a text follow it at once, as in training.

    Raises:
        DocumentError: a file that is absent, no JSON Lines, has other keys or empty texts, or does not fit the model.
    """

    def __init__(self, tokenizer: Any, path: Path, *, positions: int, together: bool = False) -> None:
        self._path = path
        rows = read_rows(path)
        if is_benchmark(rows):
            asked: dict[str, list[BenchmarkRow]] = {}
            for row in benchmark_rows(rows, scored=False):
                asked.setdefault(row.context, []).append(row)
            self._problems = [_of_rows(tokenizer, text, of_text) for text, of_text in asked.items()]
        else:
            texts: dict[str, list[tuple[str, str]]] = {}
            for line in (_checked(name, row) for name, row in rows):
                texts.setdefault(line["context"], []).append((line["question"], line["answer"]))
            self._problems = [_problem(tokenizer, text, of_text) for text, of_text in texts.items()]
        for number, problem in enumerate(self._problems):
            name = f"task file {str(path)!r}, text {number + 1}"
            refuse_too_long(problem.positions(together=together), positions, name)

    @property
    def median_length(self) -> int:
        """Tokens of the texts, their median."""
        return int(median(len(problem.tokens) for problem in self._problems))

    def refuse_uneven(self) -> None:
        """Raise a DocumentError naming two texts that are not asked equally often, as statistics over texts suppose."""
        counts = [len(problem.asks) for problem in self._problems]
        for number, count in enumerate(counts):
            if count != counts[0]:
                raise DocumentError(
                    f"task file {str(self._path)!r}: text 1 has {counts[0]} questions and text {number + 1} has "
                    f"{count}; tuning needs the same number for every text"
                )

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, number: int) -> Problem:
        return self._problems[number]


def _problem(tokenizer: Any, text: str, asked: list[tuple[str, str]]) -> Problem:
    held = TokenizedText.of(tokenizer, text)
    asks = []
    for question, answer in asked:
        at = text.find(answer)
        # An answer that stands in the text once is what its question looks for.
        gold = held.span(at, at + len(answer)) if text.count(answer) == 1 else None
        asks.append(Ask(encode(tokenizer, PROMPT.format(question)), encode(tokenizer, f" {answer}"), gold))
    return Problem(held.tokens, tuple(asks))


def _of_rows(tokenizer: Any, text: str, asked: list[BenchmarkRow]) -> Problem:
    """As `saccade compare` asks a benchmark's rows; right is who says all references, in their order."""
    begun, after, whole = framed(tokenizer, text)
    tokens = encode(tokenizer, begun) if whole else TokenizedText.of(tokenizer, begun).tokens
    said = ((row.question + after + row.answer_prefix, f" {', '.join(row.answers)}") for row in asked)
    return Problem(
        tokens, tuple(Ask(encode(tokenizer, prompt), encode(tokenizer, answer), None) for prompt, answer in said)
    )


def _checked(name: str, row: Mapping[str, Any]) -> dict[str, str]:
    if set(row) != set(KEYS):
        raise DocumentError(
            f"{name} is not an object with exactly the keys {', '.join(KEYS)}, nor has it the columns of a benchmark: "
            f"{', '.join(COLUMNS)}"
        )
    for key in KEYS:
        if not isinstance(row[key], str) or not row[key].strip():
            raise DocumentError(f"{name}: {key} is empty; calibration compares answers")
        refuse_half_characters(name, key, row[key])
    return {key: row[key].strip() if key != "context" else row[key] for key in KEYS}
