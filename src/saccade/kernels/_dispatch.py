"""Which implementation serves a call; an explicit request is honoured or refused, never replaced."""

from __future__ import annotations

from typing import Literal

from saccade.errors import KernelError

Implementation = Literal["auto", "reference", "cpu"]


def use_cpu(operation: str, implementation: Implementation, refusal: str | None) -> bool:
    """Whether the fast CPU path runs, given the reason it cannot (None when it can)."""
    if implementation == "auto":
        return refusal is None
    if implementation == "reference":
        return False
    if implementation != "cpu":
        raise KernelError(f"{operation}: unknown implementation {implementation!r}; use auto, reference or cpu")
    if refusal is not None:
        raise KernelError(f"{operation}: implementation 'cpu' cannot take this call: {refusal}")
    return True
