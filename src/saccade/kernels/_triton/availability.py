"""Whether Triton kernels can take a call."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
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
        return _unfit(tensors[0].device)
    return None


@cache
def _unfit(device: torch.device) -> str | None:
    """What the kernels have never run on."""
    if torch.version.hip is not None:
        return "these kernels were never tried on ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"{device} has compute capability {capability[0]}.{capability[1]}, below 8.0"
    return None
