"""Launches that are set up while the kernel before them ends (programmatic dependent launch)."""

from functools import cache

import torch
import triton
import triton.language as tl

_PREPARED = hasattr(tl.extra.cuda, "gdc_wait")  # as of Triton 3.4


FEW = 64
"""KV heads of all rows up to which it pays: programs that wait take the room of others (docs/log.md)."""


def early(device: torch.device, streams: int) -> dict[str, bool]:
    """What the launch of a step of so many rows' KV heads is told besides: EARLY=False where it is as any other."""
    return {"EARLY": True, "launch_pdl": True} if streams <= FEW and _can(device) else {"EARLY": False}


@cache
def _can(device: torch.device) -> bool:
    return _PREPARED and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def await_previous(EARLY: tl.constexpr) -> None:
    """Wait for all that earlier kernels write; before it a program may read nothing and must not leave.

    Behind it the next kernel may be set up in its turn.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
