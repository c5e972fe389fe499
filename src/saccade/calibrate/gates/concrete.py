"""The hard concrete distribution (Louizos et al., 2018, arXiv 1712.01312), as PruLong uses it for heads."""

from __future__ import annotations

from math import log
from typing import ClassVar

import torch
from torch import Tensor

from .gate import Gates, P, Q, constant, quadrature

TEMPERATURE = 2 / 3
"""The beta of that paper's experiments."""


class HardConcrete(Gates):
    """z = clip(s (q - p) + p, 0, 1) with s = sigmoid((ln u - ln(1 - u) + ln a) / temperature).

    Args:
        shape: of the gates.
        log_a: where all of them begin; 0 makes s symmetric about 1/2.
        device: where the parameters lie.
    """

    kind: ClassVar[str] = "hardconcrete"

    def __init__(self, shape: tuple[int, ...], *, log_a: float = 0.0, device: torch.device | None = None) -> None:
        self.log_a = constant(shape, log_a, device)

    def sample(self, uniform: Tensor) -> Tensor:
        u = uniform.to(self.log_a)
        s = torch.sigmoid((u.log() - torch.log1p(-u) + self.log_a) / TEMPERATURE)
        return (s * (Q - P) + P).clamp(0.0, 1.0)

    def p_zero(self) -> Tensor:
        """P(z = 0)."""
        return torch.sigmoid(TEMPERATURE * log(-P / Q) - self.log_a)

    def p_one(self) -> Tensor:
        """P(z = 1)."""
        return torch.sigmoid(self.log_a - TEMPERATURE * log((1 - P) / (Q - 1)))

    def expected_l0(self) -> Tensor:
        return torch.sigmoid(self.log_a - TEMPERATURE * log(-P / Q)).sum()

    def mean(self) -> Tensor:
        nodes, weights = (values.to(self.log_a.device) for values in quadrature())
        x = (nodes - P) / (Q - P)
        # P(s > x) of a logistic variable behind a sigmoid
        above = torch.sigmoid(self.log_a.detach().double()[..., None] - TEMPERATURE * torch.logit(x))
        return above @ weights
