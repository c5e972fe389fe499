"""What all kinds of gates offer to the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy
import torch
from torch import Tensor

from ...errors import OutputError

P, Q = -0.1, 1.1
"""The interval onto which hard distributions are stretched (LycheeDecode, appendix F)."""

_NODES = 256


class Gates(ABC):
    """Gates z in [0, 1], one per learnt head: 1 reads everything, 0 reuses a set. What an instance holds is trained.

    Attributes:
        kind: its name on the command line.
        mean_name: what `mean` is called in reports.
    """

    kind: ClassVar[str]
    mean_name: ClassVar[str] = "E[z]"

    @property
    def parameters(self) -> dict[str, Tensor]:
        """What training moves, float32 of the gates' shape each; leaves that require a gradient."""
        return dict(vars(self))

    @abstractmethod
    def sample(self, uniform: Tensor) -> Tensor:
        """Gates from uniform numbers in (0, 1) of their shape; differentiable in the parameters."""

    @abstractmethod
    def expected_l0(self) -> Tensor:
        """Expected number of gates that are not 0, differentiable; what the constraint counts."""

    @abstractmethod
    def mean(self) -> Tensor:
        """Expected gates, float64 of the gates' shape; a head retrieves where it exceeds 0.5."""

    def project(self) -> None:  # noqa: B027  # most kinds have nothing to bring back
        """Bring parameters back to where they are valid, after an optimiser's step."""

    def state(self) -> dict[str, Tensor]:
        """Values of the parameters."""
        return {name: value.detach().cpu().clone() for name, value in self.parameters.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Inverse of `state`.

        Raises:
            OutputError: a state of other gates, or one that is not finite.
        """
        with torch.no_grad():
            for name, value in self.parameters.items():
                saved = state.get(name)
                if saved is None or saved.shape != value.shape or not bool(saved.isfinite().all()):
                    raise OutputError(f"saved gates have no finite {name} of shape {tuple(value.shape)}")
                value.copy_(saved)


def constant(shape: tuple[int, ...], value: float, device: torch.device | None) -> Tensor:
    """A parameter that begins at one value everywhere."""
    return torch.full(shape, float(value), dtype=torch.float32, device=device).requires_grad_()


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform numbers, never 0 nor 1 where logarithms would not be finite; made on the host: one seed, one sequence."""
    smallest = torch.finfo(torch.float32).eps
    return torch.rand(shape, generator=generator, dtype=torch.float32).clamp(smallest, 1 - smallest)


def quadrature() -> tuple[Tensor, Tensor]:
    """Nodes and weights of Gauss and Legendre on (0, 1), float64."""
    nodes, weights = numpy.polynomial.legendre.leggauss(_NODES)
    return torch.from_numpy((nodes + 1) / 2), torch.from_numpy(weights / 2)
