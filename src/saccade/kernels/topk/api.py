"""Exact top-k with a total order: two machines choose the same positions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_integers
from saccade.kernels._dispatch import Implementation, use_cpu
from saccade.kernels.topk import cpu, reference

Order = Literal["position", "score"]


def topk(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    *,
    order: Order = "position",
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """The k highest scores among the first `lengths[b]` of each row; ties go to the lower position.

    Infinite scores take part like any other: +inf forces a position in, and -inf entries below the length fill up
    what is left, lower positions first. The result is undefined where a score is NaN.

    Args:
        scores: float32 `[B, G, N]`.
        lengths: int32 `[B]`, 0 to N: how many leading entries of a row may be chosen.
        k: how many, at least 1.
        order: "position" sorts the chosen ascending, "score" from the best down (ties: lower position first).
        implementation: "cpu" needs CPU tensors; "auto" takes it then, else the reference.

    Returns:
        ids int32 `[B, G, min(k, N)]`, -1 after the count; counts int32 `[B, G]` = min(k, length).

    Raises:
        KernelError: shapes or dtypes do not fit, k < 1, or the requested implementation cannot run.
    """
    check_integers("topk", lengths=lengths)
    if scores.dim() != 3 or scores.dtype != torch.float32 or scores.shape[2] < 1:
        raise KernelError(f"topk: scores must be float32 [B, G, N >= 1], got {scores.dtype} {list(scores.shape)}")
    if lengths.shape != scores.shape[:1] or lengths.device != scores.device:
        raise KernelError(f"topk: lengths must be [{scores.shape[0]}] on {scores.device}, got {list(lengths.shape)}")
    if k < 1 or order not in ("position", "score"):
        raise KernelError(f"topk: k must be at least 1 and order position or score, got {k} and {order!r}")
    refusal = None if scores.device.type == "cpu" else f"the scores are on {scores.device}"
    if use_cpu("topk", implementation, refusal):
        return cpu.topk(scores, lengths, k, order)
    return reference.topk(scores, lengths, k, order)
