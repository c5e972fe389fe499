"""HardKuma as the authors' published code trains it, which is not as the paper tells it."""

from math import exp
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.calibrate.mixture import Mixture, Text
from saccade.calibrate.problems import Problems
from saccade.calibrate.training import HeadTraining, Training

from .hardkuma import HardKuma

CODE = "code"
SMALLEST, LARGEST = 1e-6, 100.0
"""Between which alpha and beta are kept."""
FIRST, GROWTH, MOST = 2.0, 0.001, 20.0
"""The multiplier: where it begins, how it grows with the excess, and its most."""
SMOOTHING = 0.9
"""What the density keeps of its past at every step."""
RISING = 0.2
"""Share of the steps in which the learning rate rises, and share in which it falls at the end."""


class PublishedKuma(HardKuma):
    """Alpha and beta themselves are trained; a head retrieves where the mean of s, not yet stretched, is above 0.5."""

    def __init__(self, shape: tuple[int, ...], device: torch.device | None = None, seed: int = 0) -> None:
        super().__init__(shape, device, seed)
        start = torch.ones(shape, dtype=torch.float32, device=device)
        self.parameters = {name: start.clone().requires_grad_() for name in ("alpha", "beta")}

    def logarithms(self) -> tuple[Tensor, ...]:
        return tuple(value.log() for value in self.parameters.values())

    def mean(self) -> Tensor:
        # E[s] = beta B(1 + 1 / alpha, beta)
        alpha, beta = (value.detach().double() for value in self.parameters.values())
        above = 1 + 1 / alpha
        return (beta.log() + above.lgamma() + beta.lgamma() - (above + beta).lgamma()).exp()

    def project(self) -> None:
        with torch.no_grad():
            for value in self.parameters.values():
                value.clamp_(SMALLEST, LARGEST)


class PublishedTraining(HeadTraining):
    """The loss is the mean squared difference of last hidden states, of questions and answers alike.

    The constraint is the density of open gates, smoothed, in excess of the wanted one (0.0833 of 36 layers of 8 heads
    are 24 heads); below it there is none. Its gradient is that of the step's own density, as Bastings et al. have it,
    whose gates these are. The multiplier grows and never falls; the learning rate rises and falls.
    """

    counted: ClassVar[tuple[str, ...]] = (*HeadTraining.counted, "density")
    density = -1.0
    """Smoothed; below 0 before the first step."""

    def __init__(
        self, model: Any, problems: Problems, training: Training, folder: Path, about: dict[str, Any], gates: HardKuma
    ) -> None:
        super().__init__(model, problems, training, folder, {**about, "training.scale": CODE}, gates)
        if not self.step:
            self.multiplier = FIRST

    def distance(self, mixture: Mixture, text: Text, ids: Tensor, at: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self._hidden(mixture, text, ids, None)
        return (self._hidden(mixture, text, ids, self.gates.sample(self.step)) - wanted).square().mean()

    def rate(self) -> float:
        turn = RISING * self.training.steps
        return self.training.rate * min(1.0, (self.step + 1) / turn, (self.training.steps - self.step) / turn)

    def lagrangian(self, loss: Tensor, excess: Tensor) -> Tensor:
        own = excess / self._heads + self._wanted
        now = float(own.detach())
        self.density = now if self.density < 0 else SMOOTHING * self.density + (1 - SMOOTHING) * now
        return loss + self.multiplier * (own - now + self.density - self._wanted).relu()

    def climb(self, excess: float) -> None:
        self.multiplier = min(self.multiplier * exp(GROWTH * max(self.density - self._wanted, 0.0)), MOST)

    @property
    def _heads(self) -> int:
        return self.gates.mean().numel()

    @property
    def _wanted(self) -> float:
        return self.training.target / self._heads

    @staticmethod
    def _hidden(mixture: Mixture, text: Text, ids: Tensor, gates: Tensor | None) -> Tensor:
        """`[n, d]`, float32, of all tokens behind a text."""
        output = mixture.follow(text, ids, gates, logits_to_keep=1, output_hidden_states=True)
        hidden: Tensor = output.hidden_states[-1][0]
        return hidden.float()
