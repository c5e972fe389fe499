"""Learning which heads retrieve: gates, by distillation from the dense model (LycheeDecode, section 3.2)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoints.shape import shape_of
from ..errors import OutputError, SaccadeError
from ..eval.output import check_folder
from .gates import KINDS, DirectGates, Gates, uniform
from .ledger import Ledger
from .mixture import Mixture
from .problems import Problem, Problems

CHECKPOINT = "checkpoint.safetensors"
LOG = "steps.jsonl"
TRACED = ("step", "loss", "expected_l0", "multiplier")
"""Of a record, what `HeadTraining.trace` gives."""
SCALES = LETTER, LOSS, MULTIPLIER, ASCENT, SHARE = "letter", "loss", "multiplier", "ascent", "share"
"""What brings the constraint to the size of the loss; see `Training`."""
DIVIDED = (LOSS, SHARE)
"""By which the loss is divided by its first value."""


@dataclass(frozen=True, slots=True)
class Training:
    """How gates of a kind are trained; the defaults are the paper's (section 4.1, appendix F).

    Attributes:
        target: heads above the first layer with full attention that may read everything, N_target of equation 7.
        steps: optimiser steps, one text each.
        rate: learning rate of the gates, and of the multiplier.
        kept: share of the sequence that a sparse head's set holds.
        seed: of texts and of uniform numbers.
        every: steps between two records.
        scale: what brings the constraint to the size of the loss, a sum of 10^3 to 10^5 where the multiplier begins at
            0 and the excess is some tens. "letter": nothing, as in equation 7. With D the first step's loss: "loss"
            divides the loss by D, "multiplier" begins the multiplier at D, "ascent" lets it climb by the excess times
            D; "share" is "loss", and the multiplier climbs by the excess as a share of all gates. Adam does not feel a
            factor of all gradients, so that "loss" and "ascent" differ by rounding alone.

    Raises:
        SaccadeError: a value out of range, or a scale for direct gates, which begin as the teacher, at a loss of 0.
    """

    kind: str
    target: int
    steps: int = 3000
    rate: float = 0.01
    kept: float = 0.3
    seed: int = 0
    every: int = 10
    scale: str = LETTER

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SaccadeError(f"gates {self.kind!r} are not valid: {', '.join(KINDS)}")
        if not 0 < self.kept <= 1:
            raise SaccadeError(f"--kept {self.kept:g} is not valid: a share above 0 and at most 1")
        if not 0 < self.rate <= 1:
            raise SaccadeError(f"--rate {self.rate:g} is not valid: above 0 and at most 1")
        if self.scale not in SCALES:
            raise SaccadeError(f"--scale {self.scale!r} is not valid: {', '.join(SCALES)}")
        if self.kind == DirectGates.kind and self.scale != LETTER:
            raise SaccadeError(f"--scale {self.scale} is not valid of direct gates, whose loss begins at 0: letter")


class HeadTraining:
    """Gates, their optimiser and the multiplier; all that changes is in the folder after `save`.

    Args:
        model: in eval mode.
        problems: a text for each step, taken in turn.
        folder: for the checkpoint and the log.

    Raises:
        OutputError: a folder of another training, or one that cannot be written.
    """

    def __init__(self, model: Any, problems: Problems, training: Training, folder: Path, about: dict[str, Any]) -> None:
        self._model, self._problems, self.training, self._folder = model, problems, training, folder
        shape = shape_of(model.config)
        self._shape = (len(shape.full_layers) - 1, shape.kv_heads)
        self.gates: Gates = KINDS[training.kind](self._shape, device=model.device)
        self._optimiser = torch.optim.AdamW(self.gates.parameters.values(), lr=training.rate, weight_decay=0.0)
        self.multiplier = 0.0
        self.start: float | None = None  # the first step's loss
        self.step = 0
        check_folder(folder)
        # Under names of their own: `--seed` and a training's seed are two things.
        named = {f"training.{name}": value for name, value in asdict(training).items()}
        self.log = Ledger(folder / LOG, {**about, **named}, ("step",))
        self._load()

    def run(
        self,
        advance: Callable[[str], None],
        *,
        save_every: int = 50,
        until: int | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        """Train to the recipe's end, or to a step before it; parameters of the model are frozen meanwhile.

        `mixture`: the caller's own, which stays open; None: one for this call.
        """
        last = self.training.steps if until is None else min(until, self.training.steps)
        frozen = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        own = Mixture(self._model, self.training.kept) if mixture is None else mixture
        try:
            if self.step == 0:
                self._record(None)
            while self.step < last:
                loss = self._train(own, self._problems[self.step % len(self._problems)])
                if self.step % self.training.every == 0 or self.step == self.training.steps:
                    self._record(loss)
                if self.step % save_every == 0 or self.step == last:
                    self._save()
                advance(f"{self.training.kind}, seed {self.training.seed}")
        finally:
            if mixture is None:
                own.close()
            for parameter in frozen:
                parameter.requires_grad_(True)
            if until is None:
                self.log.close()

    def trace(self) -> dict[str, list[Any]]:
        """Step, loss, expected number of gates that are not 0 and multiplier of every record."""
        return {name: [record[name] for record in self.log.records.values()] for name in TRACED}

    def _train(self, mixture: Mixture, problem: Problem) -> float:
        """One step of equation 7; returns the distillation loss."""
        ids, at = (torch.tensor(values, device=self._model.device) for values in _targets(problem))
        context = mixture.read(problem.tokens)
        with torch.no_grad():
            wanted = mixture.logits(context, ids, at, None)
        seed = int(numpy.random.SeedSequence([self.training.seed, self.step]).generate_state(1)[0])
        gates = self.gates.sample(uniform(self._shape, torch.Generator().manual_seed(seed)))
        loss = (mixture.logits(context, ids, at, gates) - wanted).square().sum()
        excess = self.gates.expected_l0() - self.training.target
        if self.start is None:
            self._begin(float(loss.detach()))
        scale, size = self.training.scale, self.start or 1.0
        torch.autograd.backward((loss / size if scale in DIVIDED else loss) + self.multiplier * excess)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.gates.project()
        # Gradient ascent: up above the target, down below it (equation 7).
        rate = self.training.rate * {ASCENT: size, SHARE: 1 / gates.numel()}.get(scale, 1.0)
        self.multiplier = max(self.multiplier + rate * float(excess.detach()), 0.0)
        self.step += 1
        return float(loss.detach())

    def _begin(self, loss: float) -> None:
        """Take the first step's loss for the size of what follows."""
        if not loss and self.training.scale != LETTER:
            raise SaccadeError(f"--scale {self.training.scale}: the loss is 0 at the start and has no size")
        self.start = loss
        if self.training.scale == MULTIPLIER:
            self.multiplier = loss

    def _record(self, loss: float | None) -> None:
        if (self.step,) in self.log.records:
            return
        record = {"step": self.step, "loss": loss, "expected_l0": float(self.gates.expected_l0().detach())}
        parameters = {name: _rounded(value) for name, value in self.gates.state().items()}
        means = {"mean": _rounded(self.gates.mean()), "parameters": parameters}
        self.log.add({**record, "multiplier": self.multiplier, "start": self.start, **means})

    def _save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        tensors = {f"gates.{name}": value for name, value in self.gates.state().items()}
        for name, parameter in self.gates.parameters.items():
            for key, value in self._optimiser.state[parameter].items():
                tensors[f"adam.{name}.{key}"] = torch.as_tensor(value).cpu().clone()
        part = self._folder / f"{CHECKPOINT}.part"
        try:
            known = {"step": str(self.step), "multiplier": repr(self.multiplier), "start": repr(self.start or 0.0)}
            save_file(tensors, part, metadata=known)
            os.replace(part, self._folder / CHECKPOINT)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise OutputError(f"{str(self._folder / CHECKPOINT)!r} cannot be written: {error}") from error

    def _load(self) -> None:
        path = self._folder / CHECKPOINT
        if not path.exists():
            return
        try:
            with safe_open(str(path), framework="pt") as file:
                about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.step, self.multiplier = int(about["step"]), float(about["multiplier"])
            self.start = float(about["start"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise OutputError(f"checkpoint {str(path)!r} cannot be read: {error}") from error

        def under(prefix: str) -> dict[str, Tensor]:
            return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}

        self.gates.load(under("gates."))
        for name, parameter in self.gates.parameters.items():
            for key, value in under(f"adam.{name}.").items():
                self._optimiser.state[parameter][key] = value if key == "step" else value.to(parameter.device)


def _targets(problem: Problem) -> tuple[list[int], list[int]]:
    """All questions with their answers, one behind the other, and the places behind which an answer's token comes."""
    tokens, places = list[int](), list[int]()
    for ask in problem.asks:
        tokens += ask.prompt
        places += range(len(tokens) - 1, len(tokens) - 1 + len(ask.answer))
        tokens += (*ask.answer, *ask.after)
    return tokens, places


def _rounded(values: Tensor) -> Any:
    return numpy.round(values.detach().double().cpu().numpy(), 6).tolist()
