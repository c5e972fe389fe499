"""Soft-caps of logits, for whoever has all scores at hand."""

from __future__ import annotations

import torch
from torch import Tensor


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """`cap · tanh(logits / cap)`; -inf, where there is no token, stays. None: the logits themselves."""
    if cap is None:
        return logits
    return torch.where(logits == -torch.inf, logits, cap * torch.tanh(logits / cap))
