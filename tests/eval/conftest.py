"""A tiny random model and the bundled tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from commands import tiny_model
from saccade.checkpoints.load import ModelSource


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return ModelSource.locate(None).tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer: Any) -> Any:
    return tiny_model(tokenizer)
