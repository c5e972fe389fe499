from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Invoke, invoker, write_model
from saccade.checkpoints.load import ModelSource
from saccade.cli import app


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def invoke() -> Invoke:
    """Run `saccade`'s command line."""
    return invoker(app)


@pytest.fixture
def fails(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run the command line, expect one line on stderr and exit code 2; gives the line."""

    def no_work(*arguments: object) -> None:
        raise AssertionError("weights were loaded before the input was checked")

    monkeypatch.setattr(ModelSource, "weights", no_work)

    def run(*arguments: object) -> str:
        result = invoke(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("saccade: error: ")
        return str(line)

    return run
