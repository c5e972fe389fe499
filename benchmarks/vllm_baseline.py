"""The baseline `vllm` of `python -m benchmarks decode`: vLLM's CPU kernel on its own pages, in our model code."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from saccade.adapters.vllm.vllm_api import problem
from saccade.bench.baselines import Baseline

if TYPE_CHECKING:
    from .vllm_kernel import VllmAttention


def _refusal(device: torch.device, head_dim: int) -> str | None:
    if device.type != "cpu":
        return "its CPU kernel is what can be called without an engine"
    found = importlib.util.find_spec("vllm")
    # A folder of that name on the path is found too, but comes from no file.
    if found is None or found.origin is None:
        return "vLLM is not installed (make setup-vllm)"
    if (another := problem()) is not None:
        return another
    from .vllm_kernel import refusal

    return refusal(head_dim)


def _dense(context: int, batch: int) -> VllmAttention:
    from .vllm_kernel import VllmAttention

    return VllmAttention(context, batch)


VLLM = Baseline("vllm", _dense, _refusal)
