from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from claims.__main__ import app
from commands import Fails, Invoke, fails, invoker, model, model_folder, tokenizer

__all__ = ["fails", "invoke", "model", "model_folder", "refused", "tokenizer"]


@pytest.fixture
def invoke() -> Invoke:
    """Run `claims`'s command line."""
    return invoker(app)


@pytest.fixture
def refused(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fails]:
    """As `fails`, and nothing was written."""
    monkeypatch.chdir(tmp_path)
    yield fails
    assert list(tmp_path.iterdir()) == []
