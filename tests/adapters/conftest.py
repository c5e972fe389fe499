from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from . import tiny


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is NaN (`torch.utils.deterministic.fill_uninitialized_memory`), one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all() and torch.ones(2).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _detached() -> Iterator[None]:
    """What a test that failed has left on the shared model, the next one does not meet."""
    yield
    run = vars(tiny.llama()).get("_saccade_run")
    if run is not None:
        run.restore()
