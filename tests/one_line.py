"""What is refused is said in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind: type[Exception], match: str = "", *words: str) -> Iterator[None]:
    """Inside, an error of that kind is raised, whose message is one line that matches and holds all words."""
    with pytest.raises(kind, match=match or None) as error:
        yield
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message
