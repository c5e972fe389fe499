"""Trainings of one seed, side by side on the same texts, in one process."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from saccade.calibrate.gates import Gates
from saccade.calibrate.target import TRAINING, Target, TargetSettings
from saccade.calibrate.training import HeadTraining, Training
from saccade.cli.terminal import quiet_libraries
from saccade.errors import SaccadeError
from saccade.eval.workers import end_with_parent

from .hardkuma import HardKuma
from .published import CODE, PublishedKuma, PublishedTraining
from .remembering import RememberedProblems, RememberingMixture
from .scaled import ScaledTraining
from .variants import DIRECT, VARIANTS

BLOCK = 10
"""Steps that each training makes before the next one's turn, and after which all are saved."""


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """What the user can choose; see `python -m claims gates --help`."""

    common: TargetSettings
    variants: str
    target_heads: int | None
    seeds: int
    steps: int
    rate: float
    kept: float
    lengths: tuple[int, int]
    asked: int
    every: int
    drop_known: bool
    together: int
    workers: int
    minutes: float | None


@dataclass(frozen=True, slots=True)
class Part:
    """What one process trains.

    Attributes:
        variants: by name; all see the same texts.
        target: gates that may be open, N_target of LycheeDecode's equation 7.
        until: `time.time()` at which it stops at the end of a block; None: it does not.
    """

    settings: TrialSettings
    seed: int
    variants: tuple[str, ...]
    target: int
    until: float | None

    def folder(self, variant: str) -> Path:
        """Where a training keeps its log and its checkpoint."""
        return self.settings.common.output_dir / "training" / f"{variant}-{self.seed}"

    def trainings(self, target: Target, model: Any, problems: RememberedProblems) -> list[HeadTraining]:
        """One of each variant, as far as it has come."""
        own = self.settings
        about = target.training_about() | {"lengths": list(own.lengths), "asked": own.asked}
        training = Training(self.target, own.steps, own.rate, own.kept, self.seed, own.every)
        shape = len(target.subject.shape.full_layers) - 1, target.subject.shape.kv_heads
        made = list[HeadTraining]()
        for name in self.variants:
            given = model, problems, training, self.folder(name), about
            if name == CODE:
                made.append(PublishedTraining(*given, PublishedKuma(shape, model.device, self.seed)))
                continue
            direct = VARIANTS[name].kind == DIRECT
            gates: Gates = Gates(shape, model.device) if direct else HardKuma(shape, model.device, self.seed)
            made.append(ScaledTraining(*given, gates, VARIANTS[name].scale))
        return made


def train(part: Part, after_block: Callable[[], None] = lambda: None) -> None:
    """Go on with trainings, block by block in turns, to their end or until it is time.

    Raises:
        SaccadeError: what `Target.check` and `HeadTraining` refuse.
    """
    own = part.settings
    target = Target.check(own.common)
    model = target.subject.load()
    if own.drop_known:
        target = target.without_known(model)
    drawn = target.draw(TRAINING + part.seed, own.asked, own.lengths, own.steps, together=True)
    problems = RememberedProblems(drawn)
    trainings = part.trainings(target, model, problems)
    mixture = RememberingMixture(model, own.kept, frugal=model.device.type == "cpu")
    try:
        while unfinished := [one for one in trainings if one.step < own.steps]:
            if part.until is not None and time.time() >= part.until:
                break
            # Whoever is behind goes first: of a run that was cut off some may have done a block more.
            step = min(one.step for one in unfinished)
            until = (step // BLOCK + 1) * BLOCK
            for training in unfinished:
                if training.step < until:
                    training.run(_nothing, until=until, mixture=mixture)
            mixture.forget()
            problems.forget()
            after_block()
    finally:
        mixture.close()
        for training in trainings:
            training.log.close()


def train_alone(part: Part) -> None:
    """`train` as a process of its own, which ends with the one that has started it."""
    Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if ":" in part.settings.common.device:
        torch.cuda.set_device(part.settings.common.device)
    quiet_libraries()
    try:
        train(part)
    except SaccadeError as error:
        sys.exit(f"saccade: error: {error}")
    except KeyboardInterrupt:
        sys.exit(1)


def _nothing(_: str) -> None:
    pass
