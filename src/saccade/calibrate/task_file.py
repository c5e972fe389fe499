"""Tasks of the user's own: a JSON Lines file of texts, questions and answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import DocumentError
from ..eval.document import read_utf8
from ..eval.tokens import TokenizedText, encode
from .problems import Ask, Problem, refuse_too_long

KEYS = ("context", "question", "answer")
PROMPT = "\n\nQuestion: {}\nAnswer:"


class FileProblems:
    """The problems of a file: each line an object of `context`, `question` and `answer`; lines of one context make one.

    Args:
        positions: what the model has.
        together: all questions of a text follow it at once, as in training.

    Raises:
        DocumentError: a file that is absent, no JSON Lines, has other keys or empty texts, or does not fit the model.
    """

    def __init__(self, tokenizer: Any, path: Path, *, positions: int, together: bool = False) -> None:
        self._path = path
        texts: dict[str, list[tuple[str, str]]] = {}
        for line in _lines(path):
            texts.setdefault(line["context"], []).append((line["question"], line["answer"]))
        if not texts:
            raise DocumentError(f"task file {str(path)!r} has no line; each is an object of {', '.join(KEYS)}")
        self._problems = [_problem(tokenizer, text, asked) for text, asked in texts.items()]
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


def _lines(path: Path) -> list[dict[str, str]]:
    name = f"task file {str(path)!r}"
    parsed = []
    # Not splitlines: JSON texts may hold other line separators.
    for number, text in enumerate(re.split(r"\r\n?|\n", read_utf8(path, name)), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DocumentError(f"{name}, line {number} is not JSON: {error}") from None
        if not isinstance(line, dict) or set(line) != set(KEYS):
            raise DocumentError(f"{name}, line {number} is not an object with exactly the keys {', '.join(KEYS)}")
        for key in KEYS:
            if not isinstance(line[key], str) or not line[key].strip():
                raise DocumentError(f"{name}, line {number}: {key} is empty; calibration compares answers")
            if any("\ud800" <= character <= "\udfff" for character in line[key]):
                raise DocumentError(f"{name}, line {number}: {key} holds half of a character pair, which is no text")
        parsed.append({key: line[key].strip() if key != "context" else line[key] for key in KEYS})
    return parsed
