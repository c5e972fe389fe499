from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import app
from commands import Fails, Invoke, failing, invoker, write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def invoke() -> Invoke:
    """Run `benchmarks`'s command line."""
    return invoker(app)


@pytest.fixture
def fails(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Run the command line, expect one line on stderr and exit code 2; gives the line."""
    return failing(invoke, monkeypatch)
