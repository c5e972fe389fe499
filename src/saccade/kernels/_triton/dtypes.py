"""Which numbers Triton kernels can read on a device."""

from __future__ import annotations

import torch
from torch import Tensor

READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def dtype_refusal(*tensors: Tensor) -> str | None:
    """Why kernels cannot compute with what these tensors hold, or None."""
    for tensor in tensors:
        if tensor.dtype not in READABLE:
            return f"a tensor is {tensor.dtype}"
        if tensor.dtype == torch.float8_e4m3fn and tensor.is_cuda:
            capability = torch.cuda.get_device_capability(tensor.device)
            if capability < (8, 9):
                return f"float8_e4m3fn needs compute capability 8.9, not {capability[0]}.{capability[1]}"
    return None
