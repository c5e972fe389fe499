"""The code model in training: the network, its optimisers, and the step they have reached."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from time import perf_counter

import numpy
import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config

from saccade.errors import SaccadeError

from ..muon import Muon
from ..network import Network
from ..train import stage_at
from . import checkpoint
from .checkpoint import Progress
from .recipe import Stage, scaled, total
from .windows import Streams

WARM = 20  # steps in which the rates rise
LOOKED_AT_ONCE = 16  # rows
UNTIMED, TIMED = 3, 5  # steps of a measurement; the first ones compile


class Trainer:
    """A run of `recipe`, `factor` times as long, on windows of `streams`."""

    def __init__(
        self, config: Qwen3Config, streams: Streams, recipe: Sequence[Stage], seed: int, device: str = "cpu"
    ) -> None:
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.network = Network(config, torch.float32).to(self.device)
        self.streams, self.estimate, self.seed = streams, tuple(recipe), seed
        self.tokens = torch.from_numpy(streams.tokens.astype(numpy.int32)).to(self.device)
        named = dict(self.network.named_parameters())
        self.muon = Muon([p for name, p in named.items() if p.ndim == 2 and "embed" not in name])
        others = [p for name, p in named.items() if p.ndim != 2 or "embed" in name]
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
        self.step, self.factor, self.seconds = 0, 1.0, 0.0

    @property
    def recipe(self) -> tuple[Stage, ...]:
        """The stages with the steps that this run takes."""
        return scaled(self.estimate, self.factor)

    @property
    def steps(self) -> int:
        """All steps of this run."""
        return total(self.recipe)

    def windows(self, stage: Stage, step: int) -> Tensor:
        """Tokens [rows, length + 1] of a step: a function of the seed and the step alone."""
        starts = self.streams.starts(stage.rows, stage.length, numpy.random.default_rng([self.seed, step]))
        places = torch.from_numpy(starts).to(self.device)[:, None]
        return self.tokens[places + torch.arange(stage.length + 1, device=self.device)].long()

    def loss(self, windows: Tensor) -> Tensor:
        """Mean negative log-likelihood of the tokens of `windows` [rows, T + 1] but the first."""
        tokens, targets = windows[:, :-1], windows[:, 1:].flatten()
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.network(tokens, positions, torch.arange(tokens.numel(), device=self.device))
        return functional.cross_entropy(logits.float(), targets)

    def train_step(self) -> Tensor:
        """One step; its loss, which is not waited for."""
        stage, passed = stage_at(self.recipe, self.step)
        loss = self.loss(self.windows(stage, self.step))
        torch.autograd.backward(loss)
        warm = min(1.0, (self.step + 1) / WARM)
        muon, adam = (warm * (first + (last - first) * passed) for first, last in (stage.muon, stage.adam))
        self.muon.step(muon, stage.decay)
        for group in self.adam.param_groups:
            group["lr"] = adam
        self.adam.step()
        self.network.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach()

    def measure(self) -> dict[str, float]:
        """Seconds of a step of each stage, by its name; parameters and optimisers stay as they are.

        Only the optimisers' part of a step is left out, which is small beside the network's.
        """
        found = {}
        for stage in self.estimate:
            for number in range(UNTIMED + TIMED):
                if number == UNTIMED:
                    self.wait()
                    begun = perf_counter()
                torch.autograd.backward(self.loss(self.windows(stage, number)))
                self.network.zero_grad(set_to_none=True)
            self.wait()
            found[stage.name] = (perf_counter() - begun) / TIMED
        return found

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def held_out_loss(self, rows: Tensor) -> float:
        """Mean loss on windows [N, T + 1] that are not trained on."""
        # With gradients, which nobody asks for: without, every compiled part would be compiled once more.
        parts = rows.split(LOOKED_AT_ONCE)
        return sum(self.loss(part).item() * len(part) for part in parts) / len(rows)

    def save(self, folder: Path) -> None:
        """Write everything that a later run needs to go on.

        Raises:
            SaccadeError: a weight is not finite; nothing is written then.
        """
        for name, weight in self.network.named_parameters():
            if not weight.isfinite().all():
                raise SaccadeError(f"{name} is not finite at step {self.step}; the checkpoint before stays as it is")
        states = {"network": self.network.state_dict(), "muon": self.muon.state_dict(), "adam": self.adam.state_dict()}
        checkpoint.write(folder, Progress(self.step, self.factor, self.seconds, self.seed), states)

    def load(self, folder: Path) -> None:
        """Go on from the newest checkpoint.

        Raises:
            SaccadeError: there is none, or it is of another seed.
        """
        progress, states = checkpoint.read(folder, self.device)
        if progress.seed != self.seed:
            raise SaccadeError(f"--seed {self.seed}: the run in {folder} has seed {progress.seed}")
        self.network.load_state_dict(states["network"])
        self.muon.load_state_dict(states["muon"])
        self.adam.load_state_dict(states["adam"])
        self.step, self.factor, self.seconds = progress.step, progress.factor, progress.seconds


def mean_loss(losses: Sequence[Tensor], step: int) -> float:
    """The mean of the losses before `step`.

    Raises:
        SaccadeError: it is not finite.
    """
    mean = torch.stack([*losses]).mean().item()
    if not isfinite(mean):
        raise SaccadeError(
            f"the loss is {mean} within the {len(losses)} steps before step {step}; no checkpoint of it is kept"
        )
    return mean
