"""Launches that are set up while the kernel before them ends (programmatic dependent launch)."""

from functools import cache

import torch
import triton
import triton.language as tl

from saccade.kernels._triton.plan import padded

FEW = 64
"""KV heads of all rows up to which it pays: programs that wait take the room of others (docs/log.md)."""
RECENT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 5)


def early(device: torch.device, rows: int, heads: int) -> dict[str, bool]:
    """What the launch of a step of so many rows and heads is told besides: EARLY=False where it is as any other."""
    able = RECENT and padded(rows) * heads <= FEW and _can(device)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


@cache
def _can(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


if RECENT:

    @triton.jit
    def await_previous(EARLY: tl.constexpr) -> None:
        """Wait for all that earlier kernels write; before it a program may read nothing and must not leave.

        Behind it the next kernel may be set up in its turn.
        """
        if EARLY:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

else:  # the compiler looks up names in what it leaves out, too

    @triton.jit
    def await_previous(EARLY: tl.constexpr) -> None:
        pass
