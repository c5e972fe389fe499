"""The card of the code model: `python -m testbed.code.card --model testbed/code/code_model --evaluation FILE`.

Every figure in it comes from the model's `training.json` and from the evaluation, which is copied beside it.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .evaluate import CONTEXTS, WANTED
from .export import RECORD
from .packages import HELD_OUT
from .windows import POSITIONS

EVALUATION, CARD = "evaluation.json", "README.md"


def card(made: dict[str, Any], config: dict[str, Any], found: dict[str, Any]) -> str:
    """The text of the card, of `training.json`, `config.json` and the evaluation."""
    parts = [_HEAD, _shape(made, config), _training(made), _data(made["data"]), _worth(found), _limits(made, found)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


_HEAD = """
---
library_name: transformers
pipeline_tag: text-generation
language: code
license: apache-2.0
---
# The code model

A small Qwen3 language model of Python sources, an instrument beside the bundled model. It was taught no task, only
next-token prediction. It is no part of the wheel.
"""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _shape(made: dict[str, Any], config: dict[str, Any]) -> str:
    queries, pairs = config["num_attention_heads"], config["num_key_value_heads"]
    heads = f"{queries} query and {pairs} KV heads of {config['head_dim']}"
    sizes = f"{config['num_hidden_layers']} layers, hidden {config['hidden_size']}"
    feed_forward = f"feed-forward {config['intermediate_size']}"
    longest = max(stage["length"] for stage in made["stages"] if stage["tokens"])
    rows = [
        ("Architecture", f"`Qwen3ForCausalLM`, {sizes}, {feed_forward}, {heads}"),
        ("Parameters", f"{made['parameters']:,}, embeddings tied, {2 * made['parameters'] / 1e6:.2f} MB in bfloat16"),
        ("Positions", f"{config['max_position_embeddings']:,}; trained to {longest:,} tokens"),
        ("Tokenizer", f"byte-level BPE, {config['vocab_size']:,} entries, no unknown token; digits in pairs"),
        ("Licence", "Apache-2.0"),
    ]
    return _table(("", ""), rows)


def _training(made: dict[str, Any]) -> str:
    rows = [
        (stage["name"], f"{stage['steps']:,}", f"{stage['rows']} × {stage['length']:,}", stage["last_loss"] or "–")
        for stage in made["stages"]
    ]
    devices = ", ".join(dict.fromkeys(sitting["device"] for sitting in made["sittings"]))
    state = "" if made["step"] == made["of"] else f" **Unfinished: {made['step']:,} of {made['of']:,} steps.**"
    asked = f"--seed {made['seed']} --factor {made['factor']:g}"
    amount = f"{made['step']:,} steps, {made['tokens']:,} tokens, {made['epochs']:g} times the training text"
    return f"""
## Training
`python -m testbed.code.train --data DIR --out DIR {asked}` trains it from random weights:
{amount}, in {made["seconds"] / 60:.1f} minutes on {devices}.{state}
GPU arithmetic makes a repetition similar, not identical. `{RECORD}` has learning rates, losses on held-out text,
and package versions.

{_table(("stage", "steps", "rows × tokens", "loss at its end"), rows)}
"""


def _data(data: dict[str, Any]) -> str:
    held_out = ", ".join(f"{name} {data['versions'].get(name, '')}".strip() for name in HELD_OUT)
    return f"""
## Data
{data["files"]:,} Python files of the standard library and {len(data["packages"]) - 1} packages,
{data["tokens"]:,} tokens: `testbed/code/packages.py` names them, and what was left out.

**Held out:** {held_out}, whole,
and one module of the standard library in ten. Training files of which a quarter of the long lines stand in held-out
files were left out too. So the claims' texts ("sources of installed packages", "held-out library") are new to it.
"""


def _figure(found: dict[str, Any]) -> str:
    value, interval = found["value"], found["interval"]
    return f"{value:.3f}" + (f" ({interval[0]:.3f}–{interval[1]:.3f})" if interval else "")


def _worth(found: dict[str, Any]) -> str:
    contexts = [str(context) for context in CONTEXTS]
    names = {"all": "all", "own": "8,192 tokens before"}
    rows = [
        (names[name], part["files"], *(_figure(part["loss"][context]) for context in contexts))
        for name, part in found["summary"].items()
        if name in names
    ]  # fmt: skip
    head = ("files of", "n", *(f"loss, {int(c):,}" for c in contexts))
    return f"""
## What a longer context is worth
Loss (nats per token) on the same {found["targets"]} tokens of each held-out file, by tokens of context, with a 95%
interval by file; {found["dtype"]}, {found["device"]}. `python -m testbed.code.evaluate --model testbed/code/code_model
--data DIR --out FILE` makes `{EVALUATION}`, which has each package.

{_table(head, rows)}
"""


def _limits(made: dict[str, Any], found: dict[str, Any]) -> str:
    ratio = found["summary"]["all"]["ratio"]["8192"]
    reached = ratio["interval"] is not None and ratio["interval"][1] < WANTED
    told = ("it is" if reached else "it is **not**, or not surely,") + f" {_figure(ratio)}"
    return f"""
## Limits
- Wanted was a loss with 8,192 tokens of context at least {1 - WANTED:.0%}
  below that with 512: {told} times it.
- It saw its texts {made["epochs"]:g} times and partly remembers them: judge it by held-out text only.
- It answers no questions, knows Python alone, and nothing beyond {POSITIONS:,} tokens. One seed.
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder that testbed.code.export wrote")
    parser.add_argument("--evaluation", type=Path, required=True, help="file that testbed.code.evaluate wrote")
    arguments = parser.parse_args()
    found = json.loads(arguments.evaluation.read_text())
    (arguments.model / EVALUATION).write_text(json.dumps(found) + "\n")
    made, config = (json.loads((arguments.model / name).read_text()) for name in (RECORD, "config.json"))
    (arguments.model / CARD).write_text(card(made, config, found))


if __name__ == "__main__":
    main()
