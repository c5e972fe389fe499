"""Launching a kernel while the one before it still runs (programmatic dependent launch), for kernels that wait."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_CAPABILITY = (9, 0)


@cache
def overlaps(device: torch.device) -> bool:
    """Whether the device can; a kernel launched so reads nothing before `await_previous`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@triton.jit
def launch_next(OVERLAPS: tl.constexpr) -> None:
    """Let the next kernel take its place once all programs are here; it waits there until they are done."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def await_previous(OVERLAPS: tl.constexpr) -> None:
    """Wait until the kernels before this one are done and their results are in memory."""
    if OVERLAPS:
        gdc_wait()
