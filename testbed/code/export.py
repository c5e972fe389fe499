"""Export the code model: `python -m testbed.code.export --run DIR --data DIR --out testbed/code/code_model`.

Writes the model in the standard Hugging Face format and `training.json`, which says how it was made; the card is made
of that and of an evaluation, by `python -m testbed.code.card`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from saccade.errors import SaccadeError

from ..network import Network
from ..train import export
from . import checkpoint
from .recipe import RECIPE, TINY, Stage, code_config, scaled, tiny_config, total
from .train import LOG
from .windows import read_contents

RECORD = "training.json"


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log, of which those of steps that were taken twice are kept as taken last."""
    kept = list[dict[str, Any]]()
    for text in (folder / LOG).read_text().splitlines():
        line = json.loads(text)
        if "of" in line:  # a sitting begins at the step of a checkpoint
            kept = [before for before in kept if before.get("step", 0) <= line["step"]]
        kept.append(line)
    return kept


def record(run: Path, data: Path, recipe: Sequence[Stage]) -> dict[str, Any]:
    """How the model of the newest checkpoint was made."""
    progress, _ = checkpoint.read(run, torch.device("cpu"))
    contents, log, taken = read_contents(data), read_log(run), scaled(recipe, progress.factor)
    sittings = [line for line in log if "of" in line]
    if not sittings or sittings[-1]["data"] != contents["sha256"]:
        raise SaccadeError(f"--data {data} is not what the run in {run} was trained on")
    stages = [_stage(stage, log) for stage in taken]
    tokens = sum(line["tokens"] for line in log if "loss" in line)
    return {
        **vars(progress),
        "of": total(taken),
        "tokens": tokens,
        "epochs": round(tokens / contents["tokens"], 1),
        "stages": stages,
        "held_out_losses": {str(line["step"]): line["held_out_loss"] for line in log if "held_out_loss" in line},
        "sittings": [{key: line[key] for key in ("step", "device", "versions")} for line in sittings],
        "parameters": sittings[-1]["parameters"],
        "data": {key: value for key, value in contents.items() if key != "stretches"},
    }


def _stage(stage: Stage, log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    lines = [line for line in log if line.get("stage") == stage.name]
    taken = {"name": stage.name, "rows": stage.rows, "length": stage.length, "steps": stage.steps}
    rates = {"muon": stage.muon, "adam": stage.adam, "decay": stage.decay}
    tokens = sum(line["tokens"] for line in lines)
    return {**taken, **rates, "tokens": tokens, "last_loss": lines[-1]["loss"] if lines else None}


def write_model(run: Path, data: Path, folder: Path, *, tiny: bool = False) -> None:
    """Write the model of a run's newest checkpoint and its record.

    Raises:
        SaccadeError: no checkpoint, or not the data that the run was trained on.
    """
    contents = read_contents(data)
    made = record(run, data, TINY if tiny else RECIPE)
    network = Network((tiny_config if tiny else code_config)(contents["vocabulary"]), torch.float32)
    network.load_state_dict(checkpoint.read(run, torch.device("cpu"))[1]["network"])
    folder.mkdir(parents=True, exist_ok=True)
    export(network, data, folder)
    (folder / RECORD).write_text(json.dumps(made, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of checkpoints and log")
    parser.add_argument("--data", type=Path, required=True, help="folder that testbed.code.corpus wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--tiny", action="store_true", help="the run was a rehearsal")
    arguments = parser.parse_args()
    try:
        write_model(arguments.run, arguments.data, arguments.out, tiny=arguments.tiny)
    except SaccadeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
