"""The HardKuma distribution (LycheeDecode, section 3.2 and appendix A; Bastings et al., 2019)."""

from __future__ import annotations

from math import log
from typing import ClassVar

import torch
from torch import Tensor

from .gate import Gates, P, Q, constant, quadrature


class HardKuma(Gates):
    """z = clip(s (q - p) + p, 0, 1) with s = (1 - u^(1/beta))^(1/alpha) (equations 3 and 4).

    What is stored is ln alpha and ln beta, so that both stay positive without a bound that would stop the gradient;
    the paper does not say how it keeps them so. Everything is computed through logarithms, which stay finite, gradients
    too, while both lie between -88 and 88.

    Args:
        shape: of the gates.
        alpha, beta: where all of them begin; the paper's 1 and 1 make s uniform.
        device: where the parameters lie.
    """

    kind: ClassVar[str] = "hardkuma"

    def __init__(
        self, shape: tuple[int, ...], *, alpha: float = 1.0, beta: float = 1.0, device: torch.device | None = None
    ) -> None:
        self.log_alpha = constant(shape, log(alpha), device)
        self.log_beta = constant(shape, log(beta), device)

    def sample(self, uniform: Tensor) -> Tensor:
        # ln s = ln(1 - exp(ln u / beta)) / alpha
        inner = _log1mexp(uniform.to(self.log_beta).log() * torch.exp(-self.log_beta))
        s = torch.exp(inner * torch.exp(-self.log_alpha))
        return (s * (Q - P) + P).clamp(0.0, 1.0)

    def cdf(self, x: Tensor | float) -> Tensor:
        """P(s <= x) = 1 - (1 - x^alpha)^beta of the unstretched variable (equation 11), 0 < x < 1, elementwise."""
        return -torch.expm1(self._log_survival(x, self.log_alpha, self.log_beta))

    def p_zero(self) -> Tensor:
        """P(z = 0), equation 14."""
        return self.cdf(-P / (Q - P))

    def p_one(self) -> Tensor:
        """P(z = 1), equation 15."""
        return torch.exp(self._log_survival((1 - P) / (Q - P), self.log_alpha, self.log_beta))

    def density(self, x: Tensor) -> Tensor:
        """Density of s at x `[N]` in (0, 1) (equation 10): `[*shape, N]`, float64."""
        a, b = (value.detach().double().exp()[..., None] for value in (self.log_alpha, self.log_beta))
        log_x = x.double().log()
        return torch.exp(a.log() + b.log() + (a - 1) * log_x + (b - 1) * _log1mexp(a * log_x))

    def expected_l0(self) -> Tensor:
        return torch.exp(self._log_survival(-P / (Q - P), self.log_alpha, self.log_beta)).sum()

    def mean(self) -> Tensor:
        # E[z] = integral of P(z > t) over (0, 1)
        nodes, weights = (values.to(self.log_alpha.device) for values in quadrature())
        a, b = (value.detach().double()[..., None] for value in (self.log_alpha, self.log_beta))
        return torch.exp(self._log_survival((nodes - P) / (Q - P), a, b)) @ weights

    @staticmethod
    def _log_survival(x: Tensor | float, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
        """ln P(s > x) = beta ln(1 - x^alpha)."""
        log_x = torch.as_tensor(x, dtype=log_alpha.dtype, device=log_alpha.device).log()
        return torch.exp(log_beta) * _log1mexp(torch.exp(log_alpha) * log_x)


def _log1mexp(x: Tensor) -> Tensor:
    """ln(1 - exp(x)) for x < 0, accurate at both ends; finite, with a finite gradient, also where x rounds to 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    # Of a branch that `where` does not take, a gradient that is not finite would still reach x.
    close, far = torch.where(near, x, -1.0), torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(close)), torch.log1p(-torch.exp(far)))
