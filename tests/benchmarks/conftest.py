from collections.abc import Iterator

import pytest

from benchmarks.__main__ import app
from commands import Invoke, fails, invoker, model_folder
from saccade.recipes import machine

__all__ = ["fails", "invoke", "model_folder"]


@pytest.fixture
def invoke() -> Invoke:
    return invoker(app)


@pytest.fixture(scope="module", autouse=True)
def _no_bandwidth() -> Iterator[None]:
    """Summing a gigabyte several times says nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "read_bandwidth", lambda device: 1.0)
        yield
