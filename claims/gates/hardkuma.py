"""The gates of LycheeDecode: stretched, clipped Kumaraswamy variables."""

import numpy
import torch
from torch import Tensor

from saccade.calibrate.gates import Gates

P, Q = -0.1, 1.1
"""The interval onto which hard distributions are stretched (LycheeDecode, appendix F)."""
LOW, HIGH = -P / (Q - P), (1 - P) / (Q - P)
"""What is stretched onto 0 and 1."""
_NODES = 256


class HardKuma(Gates):
    """z = clip(s (Q - P) + P, 0, 1), s = (1 - u^(1/beta))^(1/alpha).

    Section 3.2, equations 4, 14 and 15, and appendix A; Bastings et al., 2019. What is stored is ln alpha and ln beta,
    so that both stay positive without a bound that would stop the gradient; the paper does not say how it keeps them
    so. Everything is computed through logarithms, which stay finite, gradients too, while both lie between -88 and 88.
    All begin at the paper's 1 and 1, which make s uniform.

    Args:
        seed: of u.
    """

    kind = "hardkuma"

    def __init__(self, shape: tuple[int, ...], device: torch.device | None = None, seed: int = 0) -> None:
        self._shape, self._seed = shape, seed
        start = torch.zeros(shape, dtype=torch.float32, device=device)
        self.parameters = {name: start.clone().requires_grad_() for name in ("log_alpha", "log_beta")}

    def sample(self, step: int) -> Tensor:
        seed = int(numpy.random.SeedSequence([self._seed, step]).generate_state(1)[0])
        return self.stretched(uniform(self._shape, torch.Generator().manual_seed(seed)))

    def stretched(self, u: Tensor) -> Tensor:
        """Gates from uniform numbers in (0, 1) of their shape; differentiable in the parameters."""
        log_alpha, log_beta = self.logarithms()
        # ln s = ln(1 - exp(ln u / beta)) / alpha
        inner = _log1mexp(u.to(log_beta).log() * torch.exp(-log_beta))
        return (torch.exp(inner * torch.exp(-log_alpha)) * (Q - P) + P).clamp(0.0, 1.0)

    def logarithms(self) -> tuple[Tensor, ...]:
        """ln alpha and ln beta."""
        return tuple(self.parameters.values())

    def survival(self, x: Tensor | float, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
        """P(s > x), 0 < x < 1, elementwise: ln P = beta ln(1 - x^alpha), equation 11."""
        log_x = torch.as_tensor(x, dtype=log_alpha.dtype, device=log_alpha.device).log()
        return torch.exp(torch.exp(log_beta) * _log1mexp(torch.exp(log_alpha) * log_x))

    def expected_l0(self) -> Tensor:
        return self.survival(LOW, *self.logarithms()).sum()

    def mean(self) -> Tensor:
        # E[z] = integral of P(z > t) over (0, 1), by Gauss and Legendre
        parameters = [value.detach().double()[..., None] for value in self.parameters.values()]
        nodes, weights = (torch.from_numpy(each) for each in numpy.polynomial.legendre.leggauss(_NODES))
        x = ((nodes + 1) / 2 - P) / (Q - P)
        return self.survival(x, *parameters) @ (weights / 2).to(parameters[0].device)

    def project(self) -> None:
        """All parameters are valid."""


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform numbers, never 0 nor 1 where logarithms would not be finite; made on the host: one seed, one sequence."""
    smallest = torch.finfo(torch.float32).eps
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").clamp(smallest, 1 - smallest)


def _log1mexp(x: Tensor) -> Tensor:
    """ln(1 - exp(x)) for x < 0, accurate at both ends; finite, with a finite gradient, also where x rounds to 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    # Of a branch that `where` does not take, a gradient that is not finite would still reach x.
    close, far = torch.where(near, x, -1.0), torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(close)), torch.log1p(-torch.exp(far)))
