"""Triton kernels on the CPU: in Triton's interpreter, which has to be asked for before a kernel is imported."""

import os
import sys
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
    raise pytest.UsageError("Triton was imported before its interpreter was asked for: run this folder by itself")
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))  # for the kernel tests' caches and budgets


@pytest.fixture(scope="session", autouse=True)
def _quick() -> None:
    # Not imported above, for the sake of xdist's own process.
    from interpreting import quicken

    quicken()
