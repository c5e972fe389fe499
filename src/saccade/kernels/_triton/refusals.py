"""Why Triton kernels cannot take a call; asked without importing Triton."""

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

from saccade.types import KVView, Selection

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2)
MOST_HEADS = 64
MOST_GROUP = 32
MOST_DIM = 256


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
        return unfit(tensors[0].device)
    return None


@cache
def unfit(device: torch.device) -> str | None:
    """Why the kernels do not run on a CUDA device, or None."""
    if torch.version.hip is not None:
        return "these kernels were never tried on ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"{device} has compute capability {capability[0]}.{capability[1]}, below 8.0"
    return None


def dtype_refusal(what: str, *tensors: Tensor) -> str | None:
    """Why kernels cannot compute with the numbers of these tensors, called `what`, or None."""
    for tensor in tensors:
        if tensor.dtype not in (*FLOATS, *QUANTISED):
            return f"{what} is {tensor.dtype}"
        if tensor.dtype == torch.float8_e4m3fn and tensor.is_cuda:
            capability = torch.cuda.get_device_capability(tensor.device)
            if capability < (8, 9):
                return f"float8_e4m3fn needs compute capability 8.9, not {capability[0]}.{capability[1]}"
    return None


def attention_refusal(q: Tensor, kv: KVView, selection: Selection | None = None) -> str | None:
    """Why the Triton attention kernels cannot attend with this query, or None."""
    k, v, rows = kv.k, kv.v, kv.rows
    chosen = () if selection is None else (selection.ids, selection.counts)
    if selection is not None and rows.whole is not None:
        chosen = (*chosen, rows.whole)
    reason = refusal(q, k, v, rows.page_table, rows.row_start, rows.seq_lens, *chosen)
    if reason is not None:
        return reason
    if q.dtype not in FLOATS:
        return f"q is {q.dtype}"
    odd = dtype_refusal("the cache", k, v)
    if odd is not None:
        return odd
    if kv.head_dim > MOST_DIM:
        return f"head dim {kv.head_dim} is more than {MOST_DIM}"
    if kv.kv_heads > MOST_HEADS or q.shape[1] > MOST_GROUP * kv.kv_heads:
        return f"{q.shape[1]} query heads on {kv.kv_heads} KV heads: at most {MOST_GROUP} on each of {MOST_HEADS}"
    return None
