import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from claims.__main__ import app
from claims.accumulation import passages
from claims.upkeep import texts as upkeep
from commands import Fails, Invoke, fails, invoker, model, model_folder, tokenizer
from lab import kinds
from saccade.checkpoints.load import ModelSource

__all__ = ["fails", "invoke", "model", "model_folder", "refused", "tokenizer"]


@pytest.fixture
def invoke() -> Invoke:
    return invoker(app)


PROSE, LIBRARY = functools.cache(kinds._prose), passages.library_sources
LITTLE = 60_000


@pytest.fixture(scope="module", autouse=True)
def _less_text() -> Iterator[None]:
    """Readmes and the library are millions of letters: each command would count their tokens, and read a tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "_prose", lambda: PROSE()[-LITTLE:])
        patch.setattr(passages, "library_sources", lambda **asked: LIBRARY(**asked | {"characters": LITTLE})[:LITTLE])
        patch.setattr(upkeep, "LIBRARY_CHARACTERS", LITTLE)
        patch.setattr(ModelSource, "tokenizer", functools.cache(ModelSource.tokenizer))
        yield


@pytest.fixture
def refused(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fails]:
    """As `fails`, and nothing was written."""
    monkeypatch.chdir(tmp_path)
    yield fails
    assert list(tmp_path.iterdir()) == []
