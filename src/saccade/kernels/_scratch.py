"""Working memory that CPU paths keep between calls.

A step of 128K tokens needs a few megabytes for a moment in every layer. Returned to the allocator each time, they come
back as fresh pages, and faulting those in takes longer than the softmax.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

_held = threading.local()


def scratch(purpose: str, shape: tuple[int, ...]) -> Tensor:
    """Uninitialised float32 memory, valid until the same thread asks for the same purpose again."""
    needed = math.prod(shape)
    buffer: Tensor | None = getattr(_held, purpose, None)
    if buffer is None or buffer.numel() < needed:
        # An inference tensor could not be written outside inference mode, where the next call may be.
        with torch.inference_mode(False):
            # An eighth more than asked for: the context grows by a token per step.
            buffer = torch.empty(needed + needed // 8, dtype=torch.float32)
        setattr(_held, purpose, buffer)
    return buffer[:needed].view(shape)
