"""Fewer words than RULER's texts are made of: at its import the harness sorts all pairs of them, six million."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest


@contextmanager
def few_words() -> Iterator[None]:
    """Where the harness's module is imported, which then stays: 100 of each kind of word."""
    import wonderwords

    words = {name: some[:100] for name, some in wonderwords.RandomWord()._categories.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wonderwords.RandomWord", lambda: SimpleNamespace(_categories=words))
        yield
