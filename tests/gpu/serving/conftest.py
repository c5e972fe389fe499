"""Real vLLM engines on a CUDA device; where vLLM is not installed there is nothing here to run."""

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
collect_ignore = [] if torch.cuda.device_count() > 1 else ["test_two_devices.py"]

# The engine in this process, so that what it computed can be looked at.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING")


@pytest.fixture
def engines() -> Iterator[object]:
    from cuda_engines import CudaEngines

    made = CudaEngines()
    yield made
    made.close()


@pytest.fixture(scope="module")
def truth() -> Iterator[object]:
    """What float32 says of the bundled model's tokens, for all tests of a file."""
    from cuda_engines import Truth

    made = Truth()
    yield made
    made.models.clear()
    torch.cuda.empty_cache()
