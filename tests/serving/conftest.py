"""Engines in this process, one thread, so that a test can look into the scheduler and the cache of what it runs."""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from collections.abc import Iterator

import pytest
from engines import Engines


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Makes engines that are closed at the end of the test."""
    made = Engines()
    yield made
    made.close()
