"""Kernels and decoding steps on a CUDA device; without one these tests fail, since somebody asked for them."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))  # for the kernel tests' caches and budgets
sys.path.append(str(Path(__file__).parents[1] / "serving"))  # for its servers


@pytest.fixture(autouse=True, scope="session")
def _device() -> None:
    assert torch.cuda.is_available(), "no CUDA device"
