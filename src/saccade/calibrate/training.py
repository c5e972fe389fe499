"""Learning which heads retrieve: gates, by distillation from the dense model (LycheeDecode, section 3.2)."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ..errors import OutputError
from ..eval.output import check_folder
from ..files import replace_bytes
from .gates import Gates
from .ledger import Ledger
from .mixture import Mixture, Text
from .problems import Problem, Problems

CHECKPOINT = "checkpoint.safetensors"
LOG = "steps.jsonl"
TRACED = ("step", "loss", "expected_l0", "multiplier")
"""Of a record, what `HeadTraining.trace` gives."""


@dataclass(frozen=True, slots=True)
class Training:
    """How gates are trained; the defaults are LycheeDecode's (section 4.1, appendix F).

    Attributes:
        target: heads above the first layer with full attention that may read everything, N_target of equation 7.
        steps: optimiser steps, one text each.
        rate: learning rate of the gates, and of the multiplier.
        kept: share of the sequence that a sparse head's set holds.
        seed: of the texts, and of gates that are drawn.
        every: steps between two records; the first and the last step have one, too.
    """

    target: int
    steps: int = 3000
    rate: float = 0.01
    kept: float = 0.3
    seed: int = 0
    every: int = 10


class HeadTraining:
    """Gates, their optimiser and the multiplier; all that changes is in the folder after `save`.

    Args:
        model: in eval mode.
        problems: a text for each step, taken in turn.
        folder: for the checkpoint and the log.
        about: what else the training depends on, JSON-ready.
        gates: what is trained, at its beginning.

    Attributes:
        counted: names of the numbers that a training which goes on needs, beside gates and moments.

    Raises:
        OutputError: a folder of another training, or one that cannot be written.
    """

    counted: ClassVar[tuple[str, ...]] = ("step", "multiplier")

    def __init__(
        self, model: Any, problems: Problems, training: Training, folder: Path, about: dict[str, Any], gates: Gates
    ) -> None:
        self._model, self._problems, self.training, self._folder = model, problems, training, folder
        self.gates = gates
        self._optimiser = torch.optim.AdamW(gates.parameters.values(), lr=training.rate, weight_decay=0.0)
        self.multiplier = 0.0
        self.step = 0
        check_folder(folder)
        # Under names of their own: `--seed` and a training's seed are two things.
        named = {f"training.{name}": value for name, value in {**asdict(training), "kind": gates.kind}.items()}
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
                if self.step % self.training.every == 0 or self.step in (1, self.training.steps):
                    self._record(loss)
                if self.step % save_every == 0 or self.step == last:
                    self._save()
                advance(f"{self.gates.kind}, seed {self.training.seed}")
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
        ids, at = (torch.tensor(values, device=self._model.device) for values in targets(problem))
        loss = self.distance(mixture, mixture.read(problem.tokens), ids, at)
        excess = self.gates.expected_l0() - self.training.target
        torch.autograd.backward(self.lagrangian(loss, excess))
        self._optimiser.param_groups[0]["lr"] = self.rate()
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.gates.project()
        self.climb(float(excess.detach()))
        self.step += 1
        return float(loss.detach())

    def distance(self, mixture: Mixture, text: Text, ids: Tensor, at: Tensor) -> Tensor:
        """How far the student is from the teacher at places of the tokens behind a text (equation 6)."""
        with torch.no_grad():
            wanted = mixture.logits(text, ids, at, None)
        return (mixture.logits(text, ids, at, self.gates.sample(self.step)) - wanted).square().sum()

    def rate(self) -> float:
        """Learning rate of the step at hand."""
        return self.training.rate

    def lagrangian(self, loss: Tensor, excess: Tensor) -> Tensor:
        """What the gates lower (equation 7)."""
        return loss + self.multiplier * excess

    def climb(self, excess: float) -> None:
        """The multiplier's gradient ascent: up above the target, down below it (equation 7)."""
        self.multiplier = max(self.multiplier + self.training.rate * excess, 0.0)

    def _record(self, loss: float | None) -> None:
        if (self.step,) not in self.log.records:
            mean = numpy.round(self.gates.mean().cpu().numpy(), 6).tolist()
            traced = (self.step, loss, float(self.gates.expected_l0().detach()), self.multiplier)
            self.log.add({**dict(zip(TRACED, traced, strict=True)), "mean": mean})

    def _save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        tensors = {name: torch.tensor(getattr(self, name), dtype=torch.float64, device="cpu") for name in self.counted}
        for name, parameter in self.gates.parameters.items():
            moments = {f"{name}.{key}": value for key, value in self._optimiser.state[parameter].items()}
            tensors |= {name: parameter.detach(), **moments}
        replace_bytes(self._folder / CHECKPOINT, save(tensors))

    def _load(self) -> None:
        path = self._folder / CHECKPOINT
        if not path.exists():
            return
        try:
            tensors = load_file(path)
            for name in self.counted:
                setattr(self, name, type(getattr(self, name))(tensors[name]))
            for name, parameter in self.gates.parameters.items():
                saved = tensors[name]
                if saved.shape != parameter.shape or not bool(saved.isfinite().all()):
                    raise ValueError(f"it has no finite {name} of shape {tuple(parameter.shape)}")
                parameter.data.copy_(saved)
                moments = {key: tensors[f"{name}.{key}"].to(parameter.device) for key in ("exp_avg", "exp_avg_sq")}
                self._optimiser.state[parameter] = {"step": tensors[f"{name}.step"], **moments}
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise OutputError(f"checkpoint {str(path)!r} cannot be read: {error}") from error


def targets(problem: Problem) -> tuple[list[int], list[int]]:
    """All questions with their answers, one behind the other, and the places behind which an answer's token comes."""
    tokens, places = list[int](), list[int]()
    for ask in problem.asks:
        tokens += ask.prompt
        places += range(len(tokens) - 1, len(tokens) - 1 + len(ask.answer))
        tokens += (*ask.answer, *ask.after)
    return tokens, places
