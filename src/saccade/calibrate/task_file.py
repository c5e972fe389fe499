"""Tasks of the user's own: a JSON Lines file of texts, questions and answers."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import DocumentError
from ..eval import benchmark
from ..eval.benchmark import BenchmarkRow
from ..eval.output import grouped
from ..eval.tokens import TokenizedText, encode
from .asking import Reading
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
        rows = benchmark.read_rows(path)
        own = not benchmark.is_benchmark(rows)
        checked = (_checked(*row) if own else benchmark.benchmark_row(*row, scored=False) for row in rows)
        texts = grouped(checked, lambda row: row.context)
        self._problems = [_problem(tokenizer, text, rows, own=own) for text, rows in texts.items()]
        self._blind = [_problem(tokenizer, "", rows, own=own) for rows in texts.values()]
        for number, problem in enumerate(self._problems):
            name = f"task file {str(path)!r}, text {number + 1}"
            refuse_too_long(problem.positions(together=together), positions, name)

    def without_known(self, model: Any) -> FileProblems:
        """The questions alone that dense attention does not answer when their text is left out.

        Raises:
            DocumentError: there are none.
        """
        kept = copy(self)
        kept._problems = []
        for problem, blind in zip(self._problems, self._blind, strict=True):
            pairs = zip(problem.asks, blind.asks, strict=True)
            asks = tuple(ask for ask, alone in pairs if not _known(model, blind.tokens, alone))
            kept._problems += [replace(problem, asks=asks)] if asks else []
        if not kept._problems:
            raise DocumentError(f"task file {str(self._path)!r}: dense attention answers all of it without the texts")
        return kept

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


def _problem(tokenizer: Any, text: str, rows: list[BenchmarkRow], *, own: bool) -> Problem:
    """A benchmark's rows are asked as `saccade compare` asks them; right is who says all references, in their order."""
    begun, after, whole = (text, "", False) if own else benchmark.framed(tokenizer, text)
    held = TokenizedText.of(tokenizer, begun)
    asks = []
    for row in rows:
        answer = ", ".join(row.answers)
        at = text.find(answer)
        # An answer that stands once in a text of the user's own is what its question looks for.
        gold = held.span(at, at + len(answer)) if own and text.count(answer) == 1 else None
        prompt = encode(tokenizer, row.question + after + row.answer_prefix)
        asks.append(Ask(prompt, encode(tokenizer, f" {answer}"), gold))
    return Problem(encode(tokenizer, begun) if whole else held.tokens, tuple(asks))


def _known(model: Any, begun: tuple[int, ...], ask: Ask) -> bool:
    """Whether dense attention answers a question behind what any text begins with."""
    # What is read first must be a token at least, and some models begin a text with none.
    alone = Problem((*begun, *ask.prompt[:-1]), (replace(ask, prompt=ask.prompt[-1:], gold=None),))
    return Reading(model, alone, 1).observe()[0]


def _checked(name: str, row: Mapping[str, Any]) -> BenchmarkRow:
    """A line of the user's own as a row without a metric."""
    if set(row) != set(KEYS):
        raise DocumentError(
            f"{name} is not an object with exactly the keys {', '.join(KEYS)}, nor has it the columns of a benchmark: "
            f"{', '.join(benchmark.COLUMNS)}"
        )
    for key in KEYS:
        if not isinstance(row[key], str) or not row[key].strip():
            raise DocumentError(f"{name}: {key} is empty; calibration compares answers")
        benchmark.refuse_half_characters(name, key, row[key])
    question, answer = PROMPT.format(row["question"].strip()), row["answer"].strip()
    return BenchmarkRow(name, row["context"], question, "", (answer,), max_new_tokens=0, metric=None)
