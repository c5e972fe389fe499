"""The files that both sides exchange: JSON Lines, in kvpress's columns, read strictly.

Prompts: `context`, `question`, `answer_prefix` (token ids), `answer` (text), `max_new_tokens`. Prompts of one context
stand together; a prompt's number is its line. Answers: `method`, `protocol`, `budget`, `prompt`, `read`, `tokens`; or,
for what a side could not do, `method`, `protocol`, `budget`, `refused`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.errors import OutputError
from saccade.eval.context import ANSWER_TOKENS, Context
from saccade.eval.output import writing
from saccade.eval.tokens import encode
from saccade.files import replace_text


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is read and asked; ids where a model reads, text where an answer is judged."""

    context: tuple[int, ...]
    question: tuple[int, ...]
    answer_prefix: tuple[int, ...]
    answer: str
    max_new_tokens: int = ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class Cell:
    """A method at one budget under one protocol, see the package's docstring; budget None: it has none."""

    method: str
    protocol: str
    budget: int | None


@dataclass(frozen=True, slots=True)
class Said:
    """Greedy tokens behind one prompt, and how many tokens the first of them attended to (layers, KV heads: mean)."""

    cell: Cell
    prompt: int
    read: float
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """What one side has to say.

    Attributes:
        refused: cells that it could not do, with its own words.
        about: everything else in the file, such as versions.
    """

    said: tuple[Said, ...]
    refused: dict[Cell, str]
    about: dict[str, Any]


def prompts_of(tokenizer: Any, contexts: Iterable[Context]) -> list[Prompt]:
    """The demo's questions, each cut where its answer begins."""
    prompts = []
    for context in contexts:
        for asked in context.questions:
            length = len(encode(tokenizer, f"\n\nQuestion: {asked.asked}"))
            parts = asked.tokens[:length], asked.tokens[length:]
            prompts.append(Prompt(context.tokens, *parts, asked.expected))
    return prompts


def write_lines(path: Path, records: Iterable[Any]) -> None:
    """A record a line; or an OutputError."""
    with writing(path):
        replace_text(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))


def read_answers(path: Path, prompts: int) -> Answers:
    """Read one side's file.

    Raises:
        OutputError: a line that is none of the records above, or a cell that lacks one of the prompts or has it twice.
    """
    said: list[Said] = []
    refused: dict[Cell, str] = {}
    about: dict[str, Any] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            if "method" not in record:
                about |= record
                continue
            cell = Cell(record["method"], record["protocol"], record["budget"])
            if "refused" in record:
                refused[cell] = str(record["refused"])
            else:
                tokens = tuple(int(token) for token in record["tokens"])
                said.append(Said(cell, int(record["prompt"]), float(record["read"]), tokens))
        except (ValueError, TypeError, KeyError) as error:
            raise OutputError(f"{str(path)!r}, line {number} is no record of answers: {error!r}") from None
    for cell in dict.fromkeys(one.cell for one in said if one.cell not in refused):
        found = sorted(one.prompt for one in said if one.cell == cell)
        if found != list(range(prompts)):
            raise OutputError(
                f"{str(path)!r}: {cell.method} ({cell.protocol}, budget {cell.budget}) answers {len(found)} prompts; "
                f"each of the {prompts} must be answered once"
            )
    return Answers(tuple(one for one in said if one.cell not in refused), refused, about)
