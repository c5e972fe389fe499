from collections.abc import Iterator
from pathlib import Path

import pytest

from claims.__main__ import app
from commands import Fails, Invoke, fails, invoker, model, tokenizer, write_model

__all__ = ["fails", "invoke", "model", "model_folder", "refused", "tokenizer"]


@pytest.fixture
def invoke() -> Invoke:
    """Run `claims`'s command line."""
    return invoker(app)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """C takes heads of 16 numbers, others are computed row by row."""
    return write_model(tmp_path_factory.mktemp("model"), head_dim=16)


@pytest.fixture
def refused(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fails]:
    """As `fails`, and nothing was written."""
    monkeypatch.chdir(tmp_path)
    yield fails
    assert list(tmp_path.iterdir()) == []
