"""What is refused is said in one line."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(kind: type[Exception], match: str = "", *words: str) -> Iterator[None]:
    """Inside, an error of that kind is raised, whose message is one line that matches and holds all words."""
    with pytest.raises(kind, match=match or None) as error:
        yield
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


def said(kind: type[Exception], call: Callable[..., object], *given: Any, **options: Any) -> str:
    """The message of that kind of error by which a call is refused, empty if it is not; others pass through."""
    try:
        call(*given, **options)
    except kind as error:
        return str(error)
    return ""


def lacking(told: Iterable[tuple[str, Sequence[str]]]) -> list[tuple[str, Sequence[str]]]:
    """What is not one line, or lacks one of the words that go with it: all of it, not the first alone."""
    return [
        (line, words)
        for line, words in told
        if "\n" in line or line != line.strip() or not all(word in line for word in words)
    ]
