from collections.abc import Iterator

import pytest
import torch

from . import tiny


@pytest.fixture(autouse=True)
def _poisoned(poisoned_memory: None) -> None:
    """Uninitialised memory is NaN, as `poisoned_memory` has it."""
    assert torch.empty(3, device="cpu").isnan().all() and torch.ones(2).new_empty(3).isnan().all()


@pytest.fixture(autouse=True)
def _detached() -> Iterator[None]:
    """What a test that failed has left on the shared model, the next one does not meet."""
    yield
    run = vars(tiny.llama()).get("_saccade_run")
    if run is not None:
        run.restore()
