"""Memory that nobody has written is NaN, so that reading it fails here and not only now and then."""

import pytest


@pytest.fixture(autouse=True)
def _everywhere(poisoned_memory: None) -> None:
    """In every test of kernels."""
