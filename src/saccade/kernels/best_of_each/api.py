"""The best of every row as a mask, for maps that a gradient passes through."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_integers
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._triton import refusals
from saccade.kernels.best_of_each import reference

WIDEST = 16_384
"""Keys that a program holds in registers."""


def best_of_each(scores: Tensor, counts: Tensor, *, implementation: Implementation = "auto") -> Tensor:
    """The `counts[i]` highest of each row `scores[:, i]`, as a mask; ties go to the lower position.

    Args:
        scores: float32 `[G, n, N]`, no NaN.
        counts: int32 `[n]`, 1 to N.
        implementation: "triton" needs CUDA tensors and N of at most 16,384. "auto" takes it if it can run, else the
            reference.

    Returns:
        bool `[G, n, N]`.

    Raises:
        KernelError: shapes or dtypes do not fit, or the requested implementation cannot run.
    """
    check_integers("best_of_each", counts=counts)
    if scores.dim() != 3 or scores.dtype != torch.float32 or counts.shape != scores.shape[1:2]:
        raise KernelError(
            f"best_of_each: scores float32 [G, n, N] and counts [n] do not fit: {list(scores.shape)} {scores.dtype}, "
            f"{list(counts.shape)}"
        )
    too_wide = f"rows of {scores.shape[2]} are longer than {WIDEST}" if scores.shape[2] > WIDEST else None
    chosen = choose("best_of_each", implementation, triton=lambda: refusals.refusal(scores, counts) or too_wide)
    if chosen == "triton":
        from saccade.kernels.best_of_each import triton

        with torch.cuda.device_of(scores):
            return triton.best_of_each(scores, counts)
    return reference.best_of_each(scores, counts)
