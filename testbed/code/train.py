"""Train the code model: `python -m testbed.code.train --data DIR --out DIR --seed 0 [--device cuda] [--resume]`.

Of the data only what `python -m testbed.code.corpus` wrote is needed. `--seconds N` stops with a checkpoint after so
long, and `--resume` goes on from there exactly. A new run first measures a step of each stage and multiplies the steps
of all stages by one factor, so that all sittings together take `--seconds-total`; `--factor F` is the factor itself.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.recipes.machine import device_name, versions

from ..train import stage_at
from . import checkpoint
from .recipe import RECIPE, TINY, Stage, code_config, fitting_factor, tiny_config
from .trainer import Trainer, mean_loss
from .windows import read_contents, read_streams, read_stretches

LOG = "log.jsonl"
LOG_EVERY = 50
LOOK_EVERY = 500
LOOKED_AT = 2048
"""Tokens of each held-out stretch whose loss the log tells now and then. Nothing is chosen by it."""
CHECKPOINT_SECONDS = 120.0
RESERVE = 0.9
"""Of the time that is left after measuring, what the steps may take: then come a second start, optimisers, checkpoints
and looks at held-out text."""


class Log:
    """Lines of JSON in a run's folder, and the same on standard output."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG

    def write(self, **line: Any) -> None:
        """Add a line."""
        text = json.dumps(line)
        print(text, flush=True)
        with self._path.open("a") as log:
            log.write(text + "\n")


def run(trainer: Trainer, folder: Path, *, until: float, began: float, held_out: Tensor | None = None) -> bool:
    """Train to the recipe's end or, by `perf_counter`, `until`; whether the end was reached.

    `began`: when the sitting began; all its time counts.

    Raises:
        SaccadeError: the loss is not finite; the last checkpoint before stays.
    """
    log, before, last = Log(folder), trainer.seconds, trainer.steps
    ends = {sum(stage.steps for stage in trainer.recipe[: place + 1]) for place in range(len(trainer.recipe))}
    losses, tokens, started, saved = list[Tensor](), 0, perf_counter(), perf_counter()
    while trainer.step < last:
        stage, _ = stage_at(trainer.recipe, trainer.step)
        losses.append(trainer.train_step())
        tokens += stage.tokens
        step, over = trainer.step, False
        if step % LOG_EVERY == 0 or step in ends or perf_counter() > until:
            loss, now = mean_loss(losses, step), perf_counter()  # which waits for the device
            over = now > until
            trainer.seconds = before + now - began
            speed = round(tokens / (now - started))
            log.write(step=step, stage=stage.name, loss=round(loss, 4), tokens=tokens, tokens_per_second=speed)
            losses, tokens, started = [], 0, perf_counter()
        if held_out is not None and (step % LOOK_EVERY == 0 or step in ends):
            log.write(step=step, held_out_loss=round(trainer.held_out_loss(held_out), 4), held_out_rows=len(held_out))
            started = perf_counter()
        if not losses and (over or step in ends or perf_counter() - saved > CHECKPOINT_SECONDS):
            trainer.seconds = before + perf_counter() - began
            trainer.save(folder)
            saved = started = perf_counter()
        if over:
            return step == last
    return True


def begin(trainer: Trainer, log: Log, factor: float | None, seconds: float, began: float) -> None:
    """Set the factor of a new run: the given one, or what fits into `seconds` from `began` on."""
    if factor is not None:
        trainer.factor = factor
        return
    per_step = trainer.measure()
    speeds = {stage.name: round(stage.tokens / per_step[stage.name]) for stage in trainer.estimate}
    left = seconds - (perf_counter() - began)
    if left <= 0:
        raise SaccadeError(f"--seconds-total {seconds:g}: measuring the steps has taken longer; give more")
    trainer.factor = fitting_factor(trainer.estimate, per_step, RESERVE * left)
    log.write(measured_tokens_per_second=speeds, seconds_per_step={k: round(v, 5) for k, v in per_step.items()})


def told(trainer: Trainer, contents: dict[str, Any]) -> dict[str, Any]:
    """What a sitting begins with, for its log."""
    tokens = sum(stage.steps * stage.tokens for stage in trainer.recipe)
    return {
        "step": trainer.step, "of": trainer.steps, "factor": trainer.factor, "seed": trainer.seed,
        "stages": {stage.name: stage.steps for stage in trainer.recipe}, "tokens": tokens,
        "epochs": round(tokens / trainer.streams.tokens.size, 1), "data": contents["sha256"],
        "parameters": sum(parameter.numel() for parameter in trainer.network.parameters()),
        "device": device_name(trainer.device), "versions": versions(),
    }  # fmt: skip


def train(arguments: argparse.Namespace) -> None:
    """The command.

    Raises:
        SaccadeError: bad input, or a loss that is not finite.
    """
    began = perf_counter()
    contents, streams = read_contents(arguments.data), read_streams(arguments.data)
    recipe: Sequence[Stage] = TINY if arguments.tiny else RECIPE
    config = (tiny_config if arguments.tiny else code_config)(contents["vocabulary"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    if checkpoint.latest(arguments.out) is not None and not arguments.resume:
        raise SaccadeError(f"--out {arguments.out} holds a run already; use --resume")
    trainer = Trainer(config, streams, recipe, arguments.seed, arguments.device)
    held_out = read_stretches(arguments.data)[1][:, -LOOKED_AT - 1 :].astype("int64")
    log = Log(arguments.out)
    if arguments.resume:
        trainer.load(arguments.out)
    if trainer.device.type == "cuda":
        trainer.network.compile_layers()
    if not arguments.resume:
        begin(trainer, log, arguments.factor, arguments.seconds_total, began)
    log.write(**told(trainer, contents))
    looked_at = None if arguments.tiny else torch.from_numpy(held_out).to(trainer.device)
    done = run(trainer, arguments.out, until=began + arguments.seconds, began=began, held_out=looked_at)
    rest = "that is the end of the recipe" if done else "go on with --resume"
    print(f"step {trainer.step} of {trainer.steps} after {trainer.seconds:.0f} s; {rest}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that testbed.code.corpus wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and log")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after that long, with a checkpoint")
    parser.add_argument("--seconds-total", type=float, default=1050.0, help="of all sittings; fits a new run's steps")
    parser.add_argument("--factor", type=float, help="of a new run's steps, instead of --seconds-total")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: another model and recipe, for a CPU")
    try:
        train(parser.parse_args())
    except SaccadeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
