"""What decides, head by head, between reading everything and reusing a set: numbers that training moves."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Gates:
    """Gates z in [0, 1], one per learnt head `[F - 1, Hkv]`: 1 reads everything, 0 reuses a set.

    z is the parameter itself, kept in [0, 1] after every step; nothing is sampled (DuoAttention, arXiv 2410.10819).
    All begin at DuoAttention's 1. A subclass may draw them from what is trained.

    Attributes:
        kind: their name.
        parameters: what training moves, float32 of the gates' shape each; leaves that require a gradient.
    """

    kind = "direct"

    def __init__(self, shape: tuple[int, ...], device: torch.device | None = None) -> None:
        gates = torch.ones(shape, dtype=torch.float32, device=device).requires_grad_()
        self.parameters: Mapping[str, Tensor] = {"gates": gates}

    def sample(self, step: int) -> Tensor:
        """Gates of a training's step, the same whenever it is made; differentiable in the parameters."""
        return self.parameters["gates"].clone()

    def expected_l0(self) -> Tensor:
        """Expected number of gates that are not 0, differentiable; what the constraint counts.

        Their sum stands for it: DuoAttention's L1 penalty under LycheeDecode's multiplier.
        """
        return self.parameters["gates"].sum()

    def mean(self) -> Tensor:
        """Expected gates, float64; a head retrieves where it exceeds 0.5."""
        return self.parameters["gates"].detach().double()

    def project(self) -> None:
        """Bring parameters back to where they are valid, after an optimiser's step."""
        with torch.no_grad():
            self.parameters["gates"].clamp_(0.0, 1.0)
