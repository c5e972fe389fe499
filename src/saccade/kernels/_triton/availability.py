"""Whether Triton kernels can take a call."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

from torch import Tensor


@cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on any device and slowly: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refusal(*tensors: Tensor) -> str | None:
    """Why Triton kernels cannot read these tensors, or None."""
    if not installed():
        return "triton is not installed"
    if not interpreting():
        elsewhere = next((tensor.device for tensor in tensors if not tensor.is_cuda), None)
        if elsewhere is not None:
            return f"a tensor is on {elsewhere}, not on a CUDA device"
    return None
