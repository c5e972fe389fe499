"""One number per head, optimised as it is and rounded at the end (DuoAttention, arXiv 2410.10819)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .gate import Gates, constant


class DirectGates(Gates):
    """z is the parameter itself, kept in [0, 1] after every step; nothing is sampled.

    Its sum stands for the number of heads that read everything: DuoAttention's L1 penalty under this loop's multiplier.

    Args:
        shape: of the gates.
        start: where all of them begin; DuoAttention's 1.
        device: where the parameters lie.
    """

    kind: ClassVar[str] = "direct"
    mean_name: ClassVar[str] = "gate"

    def __init__(self, shape: tuple[int, ...], *, start: float = 1.0, device: torch.device | None = None) -> None:
        self.gates = constant(shape, start, device)

    def sample(self, uniform: Tensor) -> Tensor:
        return self.gates.clone()

    def expected_l0(self) -> Tensor:
        return self.gates.sum()

    def mean(self) -> Tensor:
        return self.gates.detach().double()

    def project(self) -> None:
        with torch.no_grad():
            self.gates.clamp_(0.0, 1.0)
