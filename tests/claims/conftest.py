from __future__ import annotations

import pytest

from claims.__main__ import app
from commands import Invoke, fails, invoker, model, model_folder, tokenizer

__all__ = ["fails", "invoke", "model", "model_folder", "tokenizer"]


@pytest.fixture
def invoke() -> Invoke:
    """Run `claims`'s command line."""
    return invoker(app)
