from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from claims.__main__ import app
from commands import Fails, Invoke, failing, invoker, tiny_model, write_model
from saccade.checkpoints.load import ModelSource


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def invoke() -> Invoke:
    """Run `claims`'s command line."""
    return invoker(app)


@pytest.fixture
def fails(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Run the command line, expect one line on stderr and exit code 2; gives the line."""
    return failing(invoke, monkeypatch)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return ModelSource.locate(None).tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer: Any) -> Any:
    return tiny_model(tokenizer)
