"""Train the bundled model: `python -m testbed.train --out DIR --seed 0 [--device cuda] [--resume]`.

Tokenizer and encoded texts are made once and kept in DIR/data: copied to another machine they make the same batches.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .muon import Muon
from .network import Network, model_config
from .recipe import RECIPE, Stage
from .tasks import TaskMaker, encode_texts
from .tokenizer import save_tokenizer, train_tokenizer

CHECKPOINT_SECONDS = 240.0
LOG_EVERY = 50
MARKED = 0.5  # the least weight of an answer that the log counts
CHAINS = ("alias", "relay")  # tasks that take more than one step
Array = numpy.ndarray[Any, Any]


@dataclass(frozen=True)
class TrainingBatch:
    """Tokens and positions [B, T] and the N places of the flattened tokens that have a loss.

    `wanted`: these places; `targets`: the tokens behind them; `weights`: of their losses; `scored`: the row's task
    where the log counts the answer, else the number of tasks.
    """

    tokens: Array
    positions: Array
    wanted: Array
    targets: Array
    weights: Array
    scored: Array
    blind: bool

    def on(self, device: torch.device) -> list[Tensor]:
        """The arrays as tensors, in this order."""
        arrays = (self.tokens, self.positions, self.wanted, self.targets, self.weights, self.scored)
        tensors = map(torch.from_numpy, arrays)
        return [t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t for t in tensors]


class Stepped(Protocol):
    """What a recipe consists of."""

    @property
    def steps(self) -> int:
        """How many steps it takes."""


AnyStage = TypeVar("AnyStage", bound=Stepped)


def stage_at(recipe: Sequence[AnyStage], step: int) -> tuple[AnyStage, float]:
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
    blind = bool(rng.random() < stage.blind)
    chosen = {name: share for name, share in stage.tasks.items() if not (blind and name.startswith(CHAINS))}
    names, odds = list(chosen), numpy.array(list(chosen.values()))
    known = list(maker.tasks)
    tasks = [names[i] for i in rng.choice(len(names), shape.rows, p=odds / odds.sum())]
    rows = [maker.tasks[task](shape.length, rng, stage.half) for task in tasks]
    tokens = numpy.array([row.tokens[-shape.length :] for row in rows], dtype=numpy.int64)
    answers = numpy.array([row.answers[-shape.length :] for row in rows])
    prose = numpy.array([row.prose[-shape.length :] for row in rows])
    answers[:, 0], prose[:, 0] = 0, False  # nothing comes before a row's first token
    prose &= answers == 0
    weights = answers / max(answers.sum(), 1.0) + stage.prose * prose / max(prose.sum(), 64)
    numbers = numpy.array([known.index(task) for task in tasks])[:, None]
    scored = numpy.where(answers >= MARKED, numbers, len(known)).ravel()
    places = numpy.flatnonzero(weights)
    return TrainingBatch(
        tokens=tokens,
        positions=make_positions(shape.rows, shape.length, stage.reach, rng),
        wanted=places - 1,
        targets=tokens.ravel()[places],
        weights=weights.ravel()[places].astype(numpy.float32),
        scored=scored[places],
        blind=blind,
    )


def make_batches(
    maker: TaskMaker, recipe: Sequence[Stage], seed: int, steps: range, workers: int
) -> Iterator[TrainingBatch]:
    """The batches of `steps`, made ahead by `workers` processes, or here if there are none."""
    if not workers:
        yield from (make_batch(maker, stage_at(recipe, step)[0], seed, step) for step in steps)
        return
    waiting: deque[Future[TrainingBatch]] = deque()
    # Forked processes share the texts and are there at once; they never touch the device.
    with ProcessPoolExecutor(workers, get_context("fork"), _keep, (maker, recipe, seed)) as pool:
        for step in steps:
            waiting.append(pool.submit(_make, step))
            if len(waiting) > 6 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


_kept: list[Any] = []


def _keep(*arguments: Any) -> None:
    _kept[:] = arguments
    torch.set_num_threads(1)


def _make(step: int) -> TrainingBatch:
    maker, recipe, seed = _kept
    return make_batch(maker, stage_at(recipe, step)[0], seed, step)


class Trainer:
    """The network, its optimisers and the step they have reached."""

    def __init__(
        self, config: Qwen3Config, maker: TaskMaker, recipe: Sequence[Stage], seed: int, device: str = "cpu"
    ) -> None:
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.network, self.maker, self.recipe, self.seed = Network(config).to(self.device), maker, recipe, seed
        named = dict(self.network.named_parameters())
        matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named.items() if p.ndim != 2 or "embed" in name]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
        self.step = 0

    def train_step(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """One step; returns the loss and, by task, how many answer tokens were right and how many there were."""
        stage, passed = stage_at(self.recipe, self.step)
        tokens, positions, wanted, targets, weights, scored = batch.on(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            sights = stage.sights(self.network.config.num_hidden_layers, batch.blind)
            logits = self.network(tokens, positions, wanted, sights)
        loss = functional.cross_entropy(logits.float(), targets, reduction="none") @ weights
        torch.autograd.backward(loss)
        warm = min(1.0, (self.step + 1) / 20)
        muon, adam = (warm * (a + (b - a) * passed) for a, b in (stage.muon, stage.adam))
        self.muon.step(muon, stage.decay)
        for group in self.adam.param_groups:
            group["lr"] = adam
        self.adam.step()
        self.network.zero_grad(set_to_none=True)
        self.step += 1
        right = torch.stack([logits.argmax(-1) == targets, torch.ones_like(targets, dtype=torch.bool)], dim=1)
        scores = torch.zeros(len(self.maker.tasks) + 1, 2, device=self.device).index_add_(0, scored, right.float())
        return loss.detach(), scores

    def save(self, path: Path) -> None:
        """Write everything that a later run needs to go on."""
        state = {"network": self.network.state_dict(), "muon": self.muon.state_dict(), "adam": self.adam.state_dict()}
        partial = path.with_suffix(".partial")
        torch.save({**state, "step": self.step}, partial)
        partial.rename(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True, map_location=self.device)
        self.network.load_state_dict(state["network"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step = state["step"]


def export(network: Network, data: Path, folder: Path) -> None:
    """Write the model, in bfloat16, and the tokenizer that lies in `data`, in the standard Hugging Face format."""
    model = Qwen3ForCausalLM(network.config)
    weights = {name: tensor.cpu() for name, tensor in network.state_dict().items()}
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    model.bfloat16().save_pretrained(folder)
    for path in data.glob("tokenizer*.json"):
        compact = json.dumps(json.loads(path.read_text(encoding="utf-8")), ensure_ascii=False, separators=(",", ":"))
        (folder / path.name).write_text(f"{compact}\n", encoding="utf-8")


def run(
    trainer: Trainer, folder: Path, *, until: int | None = None, workers: int = 0, minutes: float = float("inf")
) -> None:
    """Train to the end of the recipe (or step `until`, or for `minutes`).

    Logs to `log.jsonl` and keeps checkpoints in `folder`.
    """
    ends = set(numpy.cumsum([stage.steps for stage in trainer.recipe]).tolist())
    last = max(ends) if until is None else until
    begun = started = saved = time.time()
    window: list[tuple[Tensor, Tensor]] = []
    tokens = 0
    for batch in make_batches(trainer.maker, trainer.recipe, trainer.seed, range(trainer.step, last), workers):
        window.append(trainer.train_step(batch))
        tokens += batch.tokens.size
        step, now = trainer.step, time.time()
        over = step == last or now - begun > 60 * minutes
        if step % LOG_EVERY == 0 or over:
            line = json.dumps(summary(trainer, window, tokens, time.time() - started))
            with (folder / "log.jsonl").open("a") as log:
                log.write(line + "\n")
            window, tokens, started = [], 0, time.time()
        if now - saved > CHECKPOINT_SECONDS or step in ends or over:
            trainer.save(folder / f"step-{step:06d}.pt")
            saved = now
        if over:
            return


def summary(trainer: Trainer, window: Sequence[tuple[Tensor, Tensor]], tokens: int, seconds: float) -> dict[str, Any]:
    """A line of the log."""
    losses, scores = (torch.stack(parts) for parts in zip(*window, strict=True))
    totals = dict(zip(trainer.maker.tasks, scores.sum(0).tolist(), strict=False))
    return {
        "step": trainer.step,
        "stage": stage_at(trainer.recipe, trainer.step - 1)[0].name,
        "loss": round(losses.mean().item(), 3),
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "accuracy": {task: round(hit / count, 3) for task, (hit, count) in sorted(totals.items()) if count},
    }


def prepare(folder: Path) -> tuple[PreTrainedTokenizerFast, TaskMaker]:
    """The tokenizer and the tasks, from `folder` if they have been made."""
    texts = folder / "texts.npz"
    folder.mkdir(parents=True, exist_ok=True)
    if not texts.exists():
        trained = train_tokenizer()
        save_tokenizer(trained, folder)
        arrays = encode_texts(trained)
        numpy.savez_compressed(texts, **arrays)  # type: ignore[arg-type]
    tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(folder))
    with numpy.load(texts) as kept:
        return tokenizer, TaskMaker(tokenizer, dict(kept))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*.pt"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches ahead")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after that long; see --resume")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = checkpoints(arguments.out)
    if found and not arguments.resume:
        parser.error(f"{arguments.out} holds a run already; use --resume")
    tokenizer, maker = prepare(arguments.out / "data")
    trainer = Trainer(model_config(len(tokenizer)), maker, RECIPE, arguments.seed, arguments.device)
    if found:
        trainer.load(found[-1])
    if trainer.device.type == "cuda":
        trainer.network.compile_layers()
    run(trainer, arguments.out, workers=arguments.workers, minutes=arguments.minutes)
    export(trainer.network, arguments.out / "data", arguments.out / "model")


if __name__ == "__main__":
    main()
