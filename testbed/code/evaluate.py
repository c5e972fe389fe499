"""What a longer context is worth: `python -m testbed.code.evaluate --model DIR --data DIR --out FILE`.

The loss on the same held-out tokens with more and less in front of them. Every stretch's targets lie in a file of their
own, and intervals are by file. Seconds on a GPU; on a CPU `--most 2` takes two files of every package.
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
from torch.nn import functional

from claims.judging.claim import Group, Sample, Test
from claims.judging.effects import RULES, TEXTS, effect_of
from saccade.checkpoints.load import ModelSource, pick_device
from saccade.errors import SaccadeError
from saccade.recipes.machine import device_name, versions

from .windows import POSITIONS, TARGETS, Stretch, read_contents, read_stretches

CONTEXTS = (512, 2048, 8192, POSITIONS - TARGETS)
"""Tokens in front of the targets."""
WANTED = 0.9
"""The ratio of the losses with 8,192 and with 512 tokens of context that the instrument should stay below."""


@torch.inference_mode()
def target_loss(model: Any, tokens: Tensor, context: int) -> float:
    """Mean negative log-likelihood of the last `TARGETS` of `tokens` [POSITIONS] behind `context` tokens."""
    row = tokens[-TARGETS - context :]
    logits = model(row[None, :-1], logits_to_keep=TARGETS, use_cache=False).logits
    return functional.cross_entropy(logits[0].float(), row[-TARGETS:]).item()


def losses(model: Any, tokens: Tensor, contexts: Sequence[int] = CONTEXTS) -> list[dict[int, float]]:
    """`target_loss` of each of the stretches' `tokens` [N, POSITIONS] behind each context."""
    return [{context: target_loss(model, row, context) for context in contexts} for row in tokens]


def summary(stretches: Sequence[Stretch], measured: Sequence[dict[int, float]]) -> dict[str, Any]:
    """Mean losses and their ratios to that of the shortest context, with 95% intervals by file, in all and by package.

    Under "own" are the stretches whose file has 8,192 tokens before its targets: the others' contexts reach into the
    files before.
    """
    chosen = {
        "all": range(len(stretches)),
        "own": [number for number, stretch in enumerate(stretches) if stretch.own >= 8192],
        **{
            package: [number for number, stretch in enumerate(stretches) if stretch.package == package]
            for package in dict.fromkeys(stretch.package for stretch in stretches)
        },
    }
    return {name: _of([measured[number] for number in numbers]) for name, numbers in chosen.items() if numbers}


def _of(measured: Sequence[dict[int, float]]) -> dict[str, Any]:
    samples = [
        Sample(str(number), str(context), {"loss": loss})
        for number, row in enumerate(measured)
        for context, loss in row.items()
    ]
    contexts = [*measured[0]]
    found: dict[str, Any] = {"files": len(measured), "loss": {}, "ratio": {}}
    for context in contexts:
        own, shortest = Group(str(context)), Group(str(contexts[0]))
        effect = effect_of(Test(f"loss with {context} tokens of context", "loss", own), samples, TEXTS)
        found["loss"][str(context)] = {"value": effect.value, "interval": effect.interval}
        if context != contexts[0]:
            test = Test(f"loss with {context} tokens over that with {contexts[0]}", "loss", own, shortest, kind="ratio")
            effect = effect_of(test, samples, TEXTS)
            found["ratio"][str(context)] = {"value": effect.value, "interval": effect.interval}
    return found


def evaluate(folder: Path, data: Path, device: str, most: int | None = None) -> dict[str, Any]:
    """The evaluation of a model folder on the held-out stretches of `data`, or on the first `most` of every package.

    Raises:
        SaccadeError: no model, or no data.
    """
    contents, (stretches, tokens) = read_contents(data), read_stretches(data)
    seen, kept = dict[str, int](), list[int]()
    for number, stretch in enumerate(stretches):
        seen[stretch.package] = seen.get(stretch.package, 0) + 1
        if most is None or seen[stretch.package] <= most:
            kept.append(number)
    model = ModelSource.locate(folder).weights(pick_device(device), torch.float32)
    begun = perf_counter()
    measured = losses(model, torch.from_numpy(tokens[kept].astype("int64")).to(model.device))
    rows = [
        {"package": stretches[number].package, "path": stretches[number].path, "own": stretches[number].own, **row}
        for number, row in zip(kept, measured, strict=True)
    ]
    return {
        "device": device_name(model.device),
        "dtype": "float32",
        "versions": versions(),
        "seconds": round(perf_counter() - begun, 1),
        "data": contents["held_out_sha256"],
        "targets": TARGETS,
        "intervals": RULES[TEXTS],
        "wanted": {"8192": WANTED},
        "summary": summary([stretches[number] for number in kept], measured),
        "files": rows,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder that testbed.code.corpus wrote")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--most", type=int, help="stretches of every package, instead of all")
    arguments = parser.parse_args()
    try:
        found = evaluate(arguments.model, arguments.data, arguments.device, arguments.most)
    except SaccadeError as error:
        sys.exit(f"error: {error}")
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    for context, ratio in found["summary"]["all"]["ratio"].items():
        value, interval = ratio["value"], ratio["interval"]
        print(f"loss with {context} tokens of context over that with {CONTEXTS[0]}: {value:.3f}, 95% {interval}")


if __name__ == "__main__":
    main()
