"""Stretches of held-out text that share no token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from saccade.errors import DocumentError
from saccade.eval.document import language_reference, library_sources
from saccade.eval.tokens import TokenizedText

LIBRARY_CHARACTERS = 1_000_000

SOURCES: dict[str, Callable[[], str]] = {
    "reference": lambda: language_reference(held_out=True),
    "library": lambda: library_sources(held_out=True, characters=LIBRARY_CHARACTERS),
}
"""The language reference first; when it is used up, modules of the standard library. The bundled model saw neither."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens of a source, behind those that the tokenizer begins every text with."""

    source: str
    tokens: tuple[int, ...]


def stretches(tokenizer: Any, count: int, length: int) -> tuple[Stretch, ...]:
    """`count` stretches of `length` tokens.

    Raises:
        DocumentError: if there is not as much text.
    """
    found = list[Stretch]()
    for source, text in SOURCES.items():
        if len(found) == count:
            break
        encoded = TokenizedText.of(tokenizer, text())
        beginning, ids = encoded.tokens[: encoded.start], encoded.tokens[encoded.start :]
        own = length - len(beginning)
        starts = range(0, len(ids) - own + 1, own)[: count - len(found)]
        found += [Stretch(source, (*beginning, *ids[start : start + own])) for start in starts]
    if len(found) < count:
        raise DocumentError(f"--texts {count} is not valid: of {length} tokens there are {len(found)} without overlap")
    return tuple(found)
