"""What decides, head by head, between reading everything and reusing a set: parameters that training moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import log
from typing import ClassVar

import numpy
import torch
from torch import Tensor

from ..errors import OutputError

P, Q = -0.1, 1.1
"""The interval onto which hard distributions are stretched (LycheeDecode, appendix F)."""
LOW, HIGH = -P / (Q - P), (1 - P) / (Q - P)
"""What is stretched onto 0 and 1."""
TEMPERATURE = 2 / 3
"""The beta of the hard concrete distribution's experiments."""
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
        """Inverse of `state`; raises an OutputError for one of other gates, or one that is not finite."""
        with torch.no_grad():
            for name, value in self.parameters.items():
                saved = state.get(name)
                if saved is None or saved.shape != value.shape or not bool(saved.isfinite().all()):
                    raise OutputError(f"saved gates have no finite {name} of shape {tuple(value.shape)}")
                value.copy_(saved)


class DirectGates(Gates):
    """z is the parameter itself, kept in [0, 1] after every step; nothing is sampled (DuoAttention, arXiv 2410.10819).

    Its sum stands for the number of heads that read everything: DuoAttention's L1 penalty under this loop's multiplier.
    All begin at DuoAttention's 1.
    """

    kind: ClassVar[str] = "direct"
    mean_name: ClassVar[str] = "gate"

    def __init__(self, shape: tuple[int, ...], *, device: torch.device | None = None) -> None:
        self.gates = _constant(shape, 1.0, device)

    def sample(self, uniform: Tensor) -> Tensor:
        return self.gates.clone()

    def expected_l0(self) -> Tensor:
        return self.gates.sum()

    def mean(self) -> Tensor:
        return self.gates.detach().double()

    def project(self) -> None:
        with torch.no_grad():
            self.gates.clamp_(0.0, 1.0)


class HardGates(Gates):
    """z = clip(s (Q - P) + P, 0, 1); how s in (0, 1) is distributed is the kind's (LycheeDecode, 14 and 15)."""

    @abstractmethod
    def survival(self, x: Tensor | float, *parameters: Tensor) -> Tensor:
        """P(s > x), 0 < x < 1, elementwise."""

    @abstractmethod
    def unstretched(self, uniform: Tensor) -> Tensor:
        """Samples of s."""

    def sample(self, uniform: Tensor) -> Tensor:
        return (self.unstretched(uniform) * (Q - P) + P).clamp(0.0, 1.0)

    def expected_l0(self) -> Tensor:
        return self.survival(LOW, *self.parameters.values()).sum()

    def mean(self) -> Tensor:
        # E[z] = integral of P(z > t) over (0, 1), by Gauss and Legendre
        parameters = [value.detach().double()[..., None] for value in self.parameters.values()]
        nodes, weights = (torch.from_numpy(each) for each in numpy.polynomial.legendre.leggauss(_NODES))
        x = ((nodes + 1) / 2 - P) / (Q - P)
        return self.survival(x, *parameters) @ (weights / 2).to(parameters[0].device)


class HardConcrete(HardGates):
    """s = sigmoid((ln u - ln(1 - u) + ln a) / temperature) (Louizos et al., 2018, arXiv 1712.01312), as in PruLong.

    `log_a` is where all of them begin; 0 makes s symmetric about 1/2.
    """

    kind: ClassVar[str] = "hardconcrete"

    def __init__(self, shape: tuple[int, ...], *, log_a: float = 0.0, device: torch.device | None = None) -> None:
        self.log_a = _constant(shape, log_a, device)

    def unstretched(self, uniform: Tensor) -> Tensor:
        u = uniform.to(self.log_a)
        return torch.sigmoid((u.log() - torch.log1p(-u) + self.log_a) / TEMPERATURE)

    def survival(self, x: Tensor | float, *parameters: Tensor) -> Tensor:
        return torch.sigmoid(parameters[0] - _logistic(x, parameters[0]))


class HardKuma(HardGates):
    """s = (1 - u^(1/beta))^(1/alpha) (LycheeDecode, section 3.2, equation 4, and appendix A; Bastings et al., 2019).

    What is stored is ln alpha and ln beta, so that both stay positive without a bound that would stop the gradient;
    the paper does not say how it keeps them so. Everything is computed through logarithms, which stay finite, gradients
    too, while both lie between -88 and 88. All begin at `alpha` and `beta`; the paper's 1 and 1 make s uniform.
    """

    kind: ClassVar[str] = "hardkuma"

    def __init__(
        self, shape: tuple[int, ...], *, alpha: float = 1.0, beta: float = 1.0, device: torch.device | None = None
    ) -> None:
        self.log_alpha, self.log_beta = (_constant(shape, log(value), device) for value in (alpha, beta))

    def unstretched(self, uniform: Tensor) -> Tensor:
        # ln s = ln(1 - exp(ln u / beta)) / alpha
        inner = _log1mexp(uniform.to(self.log_beta).log() * torch.exp(-self.log_beta))
        return torch.exp(inner * torch.exp(-self.log_alpha))

    def survival(self, x: Tensor | float, *parameters: Tensor) -> Tensor:
        log_alpha, log_beta = parameters
        log_x = torch.as_tensor(x, dtype=log_alpha.dtype, device=log_alpha.device).log()
        # ln P(s > x) = beta ln(1 - x^alpha), equation 11
        return torch.exp(torch.exp(log_beta) * _log1mexp(torch.exp(log_alpha) * log_x))


KINDS: dict[str, type[HardKuma | DirectGates | HardConcrete]] = {
    kind.kind: kind for kind in (HardKuma, DirectGates, HardConcrete)
}


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform numbers, never 0 nor 1 where logarithms would not be finite; made on the host: one seed, one sequence."""
    smallest = torch.finfo(torch.float32).eps
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").clamp(smallest, 1 - smallest)


def _constant(shape: tuple[int, ...], value: float, device: torch.device | None) -> Tensor:
    """A parameter that begins at one value everywhere."""
    return torch.full(shape, float(value), dtype=torch.float32, device=device).requires_grad_()


def _logistic(x: Tensor | float, like: Tensor) -> Tensor:
    """The logistic variable that `HardConcrete` makes x of where ln a is 0."""
    return (TEMPERATURE * torch.logit(torch.as_tensor(x, dtype=torch.float64))).to(like)


def _log1mexp(x: Tensor) -> Tensor:
    """ln(1 - exp(x)) for x < 0, accurate at both ends; finite, with a finite gradient, also where x rounds to 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    # Of a branch that `where` does not take, a gradient that is not finite would still reach x.
    close, far = torch.where(near, x, -1.0), torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(close)), torch.log1p(-torch.exp(far)))
