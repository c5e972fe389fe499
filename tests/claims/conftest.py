import functools
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from claims.__main__ import app
from commands import Fails, Invoke, fails, invoker, model, model_folder, tokenizer
from lab import kinds

__all__ = ["fails", "invoke", "model", "model_folder", "refused", "tokenizer"]


@pytest.fixture
def invoke() -> Invoke:
    return invoker(app)


@pytest.fixture(scope="session", autouse=True)
def _few_readmes() -> Iterator[None]:
    """Those of all packages are millions of letters, of which each prompt would count the tokens."""
    prose = functools.cache(kinds._prose)
    with patch.object(kinds, "_prose", lambda: prose()[-60_000:]):
        yield


@pytest.fixture
def refused(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fails]:
    """As `fails`, and nothing was written."""
    monkeypatch.chdir(tmp_path)
    yield fails
    assert list(tmp_path.iterdir()) == []
