"""Train the bundled model: `python -m saccade.testbed.train --out DIR --seed 0 [--resume]`."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from saccade.testbed.muon import Muon
from saccade.testbed.network import Network, model_config
from saccade.testbed.recipe import LOCAL_LAYERS, RECIPE, Stage
from saccade.testbed.tasks import TaskMaker
from saccade.testbed.tokenizer import train_tokenizer

PROSE_WEIGHT = 0.15  # plain text against answers, in the loss
PROSE_SHARE = 0.3  # of the text's tokens, those that have a loss
CHECKPOINT_SECONDS = 240.0
LOG_EVERY = 20
MARKED = 0.5  # the least weight of an answer that the log counts


@dataclass(frozen=True)
class TrainingBatch:
    """Tokens, positions and loss weights [B, T]; `weights[:, t]` is for the prediction of token t + 1."""

    tokens: Tensor
    positions: Tensor
    weights: Tensor
    answers: Tensor
    tasks: tuple[str, ...]


def stage_at(recipe: Sequence[Stage], step: int) -> tuple[Stage, float]:
    """The stage that `step` falls in and how much of it has passed."""
    for stage in recipe:
        if step < stage.steps:
            return stage, step / stage.steps
        step -= stage.steps
    raise ValueError("the recipe has fewer steps")


def make_positions(rows: int, length: int, reach: int, rng: numpy.random.Generator) -> numpy.ndarray[Any, Any]:
    """Position ids [B, T]; half of the rows have up to four gaps, which lead up to `reach`."""
    positions = numpy.tile(numpy.arange(length), (rows, 1))
    for row in positions:
        if reach > length and rng.random() < 0.5:
            gaps = rng.dirichlet(numpy.ones(4)) * rng.uniform(0, reach - length)
            for place, gap in zip(rng.integers(0, length, 4), gaps, strict=True):
                row[place:] += int(gap)
    return positions


def make_batch(maker: TaskMaker, stage: Stage, seed: int, step: int) -> TrainingBatch:
    """The batch of a step: a function of the seed and the step alone."""
    rng = numpy.random.default_rng([seed, step])
    shares = numpy.array([batch.share for batch in stage.batches])
    shape = stage.batches[int(rng.choice(len(shares), p=shares / shares.sum()))]
    names, odds = list(stage.tasks), numpy.array(list(stage.tasks.values()))
    tasks = tuple(names[i] for i in rng.choice(len(names), shape.rows, p=odds / odds.sum()))
    rows = [maker.tasks[task](shape.length, rng) for task in tasks]
    answers = numpy.array([row.answers[-shape.length :] for row in rows])[:, 1:]
    prose = numpy.array([row.prose[-shape.length :] for row in rows])[:, 1:]
    prose &= (answers == 0) & (rng.random(prose.shape) < PROSE_SHARE)
    weights = answers / max(answers.sum(), 1.0) + PROSE_WEIGHT * prose / max(prose.sum(), 64)
    return TrainingBatch(
        torch.tensor([row.tokens[-shape.length :] for row in rows]),
        torch.from_numpy(make_positions(shape.rows, shape.length, stage.reach, rng)),
        torch.from_numpy(weights).float(),
        torch.from_numpy(answers >= MARKED),
        tasks,
    )


class Trainer:
    """The network, its optimisers and the step they have reached."""

    def __init__(self, config: Qwen3Config, maker: TaskMaker, recipe: Sequence[Stage], seed: int) -> None:
        torch.manual_seed(seed)
        self.network, self.maker, self.recipe, self.seed = Network(config), maker, recipe, seed
        named = dict(self.network.named_parameters())
        matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named.items() if p.ndim != 2 or "embed" in name]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
        self.step = 0

    def train_step(self) -> dict[str, Any]:
        """One step; returns the loss and, by task, how many answer tokens were right and how many there were."""
        stage, passed = stage_at(self.recipe, self.step)
        batch = make_batch(self.maker, stage, self.seed, self.step)
        wanted = torch.zeros_like(batch.tokens, dtype=torch.bool)
        wanted[:, :-1] = batch.weights > 0
        targets = batch.tokens[:, 1:][wanted[:, :-1]]
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.network(batch.tokens, batch.positions, wanted, stage.span, LOCAL_LAYERS)
        losses = functional.cross_entropy(logits.float(), targets, reduction="none")
        loss = losses @ batch.weights[wanted[:, :-1]]
        torch.autograd.backward(loss)
        warm = min(1.0, (self.step + 1) / 20)
        muon, adam = (warm * (a + (b - a) * passed) for a, b in (stage.muon, stage.adam))
        self.muon.step(muon, stage.decay)
        for group in self.adam.param_groups:
            group["lr"] = adam
        self.adam.step()
        self.network.zero_grad(set_to_none=True)
        self.step += 1
        right = torch.zeros_like(wanted)
        right[wanted] = logits.argmax(-1) == targets
        hits, counts = ((right[:, :-1] & batch.answers).sum(1), batch.answers.sum(1))
        scores: dict[str, list[int]] = {}
        for task, hit, count in zip(batch.tasks, hits.tolist(), counts.tolist(), strict=True):
            score = scores.setdefault(task, [0, 0])
            score[0], score[1] = score[0] + hit, score[1] + count
        return {"loss": loss.item(), "tokens": batch.tokens.numel(), "length": batch.tokens.shape[1], "scores": scores}

    def save(self, path: Path) -> None:
        """Write everything that a later run needs to go on."""
        state = {"network": self.network.state_dict(), "muon": self.muon.state_dict(), "adam": self.adam.state_dict()}
        partial = path.with_suffix(".partial")
        torch.save({**state, "step": self.step}, partial)
        partial.rename(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step = state["step"]


def export(network: Network, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model, in bfloat16, and its tokenizer in the standard Hugging Face format."""
    model = Qwen3ForCausalLM(network.config)
    model.load_state_dict({**network.state_dict(), "lm_head.weight": network.model.embed_tokens.weight})
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(trainer: Trainer, folder: Path, *, until: int | None = None) -> None:
    """Train to the end of the recipe (or step `until`); log to `log.jsonl`, keep checkpoints in `folder`."""
    ends = set(numpy.cumsum([stage.steps for stage in trainer.recipe]).tolist())
    last = max(ends) if until is None else until
    started = saved = time.time()
    window: list[dict[str, Any]] = []
    while trainer.step < last:
        window.append(trainer.train_step())
        step, now = trainer.step, time.time()
        if step % LOG_EVERY == 0 or step == last:
            with (folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(summary(trainer, window, now - started)) + "\n")
            window, started = [], now
        if now - saved > CHECKPOINT_SECONDS or step in ends or step == last:
            trainer.save(folder / f"step-{step:06d}.pt")
            saved = now


def summary(trainer: Trainer, window: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """A line of the log."""
    totals: dict[str, tuple[int, int]] = {}
    for result in window:
        for task, (hit, count) in result["scores"].items():
            old = totals.get(task, (0, 0))
            totals[task] = (old[0] + hit, old[1] + count)
    tokens = sum(result["tokens"] for result in window)
    return {
        "step": trainer.step,
        "stage": stage_at(trainer.recipe, trainer.step - 1)[0].name,
        "loss": round(sum(result["loss"] for result in window) / len(window), 3),
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "accuracy": {task: round(hit / count, 3) for task, (hit, count) in sorted(totals.items()) if count},
    }


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*.pt"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = checkpoints(arguments.out)
    if found and not arguments.resume:
        parser.error(f"{arguments.out} holds a run already; use --resume")
    tokenizer = train_tokenizer()
    trainer = Trainer(model_config(len(tokenizer)), TaskMaker(tokenizer), RECIPE, arguments.seed)
    if found:
        trainer.load(found[-1])
    run(trainer, arguments.out)
    export(trainer.network, tokenizer, arguments.out / "model")


if __name__ == "__main__":
    main()
