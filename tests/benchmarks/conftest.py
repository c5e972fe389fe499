from __future__ import annotations

import pytest

from benchmarks.__main__ import app
from commands import Invoke, fails, invoker, model_folder

__all__ = ["fails", "invoke", "model_folder"]


@pytest.fixture
def invoke() -> Invoke:
    """Run `benchmarks`'s command line."""
    return invoker(app)
