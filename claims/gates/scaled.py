"""Trainings whose constraint is brought to the size of the loss."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.calibrate.gates import Gates
from saccade.calibrate.mixture import Mixture, Text
from saccade.calibrate.problems import Problems
from saccade.calibrate.training import HeadTraining, Training, targets
from saccade.errors import SaccadeError

LETTER, LOSS, MULTIPLIER, SHARE = "letter", "loss", "multiplier", "share"
DIVIDED = (LOSS, SHARE)
"""By which the loss is divided by its first value."""


class ScaledTraining(HeadTraining):
    """The loss is a sum of 10^3 to 10^5 where the multiplier begins at 0 and the excess is some tens.

    "letter": nothing is done about it, as in equation 7. "loss" divides the loss by its first value, "multiplier"
    begins the multiplier there; "share" is "loss", and the multiplier climbs by the excess as a share of all gates.
    Direct gates begin open, without any loss: theirs is divided by that of gates half open, on the first text.
    """

    def __init__(
        self, model: Any, problems: Problems, training: Training, folder: Path, about: dict[str, Any], gates: Gates,
        scale: str,
    ) -> None:  # fmt: skip
        self.scale = scale
        super().__init__(model, problems, training, folder, {**about, "training.scale": scale}, gates)
        self._begins_open = gates.kind == Gates.kind and scale in DIVIDED
        first = self.log.records.get((1,)) if self.step and not self._begins_open else None
        self._start: float | None = first["loss"] if first else None

    def distance(self, mixture: Mixture, text: Text, ids: Tensor, at: Tensor) -> Tensor:
        if self._start is None and self._begins_open:
            first, half = self._problems[0], torch.full_like(self.gates.sample(0), 0.5)
            behind, answers = (torch.tensor(values, device=half.device) for values in targets(first))
            with torch.no_grad():
                given = mixture.read(first.tokens), behind, answers
                said, wanted = mixture.logits(*given, half), mixture.logits(*given, None)
                self._start = float((said - wanted).square().sum())
        return super().distance(mixture, text, ids, at)

    def lagrangian(self, loss: Tensor, excess: Tensor) -> Tensor:
        if self._start is None:
            self._start = float(loss.detach())
            if self.scale == MULTIPLIER:
                self.multiplier = self._start
        if not self._start and self.scale != LETTER:
            raise SaccadeError(f"{self.scale}: the loss is 0 at the start and has no size")
        return super().lagrangian(loss / self._start if self.scale in DIVIDED else loss, excess)

    def climb(self, excess: float) -> None:
        super().climb(excess / self.gates.mean().numel() if self.scale == SHARE else excess)
