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
from .packages import HELD_OUT, LEFT_OUT, STANDARD_LIBRARY
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
---
# The code model

A small Qwen3 language model of Python sources. It is the second instrument of this project, beside the bundled model:
no task was taught, and what it knows of a long context is what plain next-token prediction gives. No part of the wheel.
"""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _shape(made: dict[str, Any], config: dict[str, Any]) -> str:
    heads = f"{config['num_attention_heads']} query / {config['num_key_value_heads']} KV heads of {config['head_dim']}"
    sizes = f"{config['num_hidden_layers']} layers, hidden {config['hidden_size']}"
    feed_forward = f"feed-forward {config['intermediate_size']}"
    longest = max(stage["length"] for stage in made["stages"] if stage["tokens"])
    rows = [
        ("Architecture", f"`Qwen3ForCausalLM`, {sizes}, {feed_forward}, {heads}, tied embeddings"),
        ("Parameters", f"{made['parameters']:,}, {2 * made['parameters'] / 1e6:.2f} MB in bfloat16"),
        ("Positions", f"{config['max_position_embeddings']:,}; trained to {longest:,} tokens"),
        ("Tokenizer", f"byte-level BPE, {config['vocab_size']:,} entries, no unknown token; digits in pairs"),
    ]
    return _table(("", ""), rows)


def _training(made: dict[str, Any]) -> str:
    rows = [
        (
            stage["name"], f"{stage['steps']:,}", f"{stage['rows']} × {stage['length']:,}", f"{stage['tokens']:,}",
            *(f"{first:g} → {last:g}" for first, last in (stage["muon"], stage["adam"])), stage["last_loss"] or "–",
        )
        for stage in made["stages"]
    ]  # fmt: skip
    head = ("stage", "steps", "rows × tokens", "tokens", "Muon", "AdamW", "loss at its end")
    devices = ", ".join(dict.fromkeys(sitting["device"] for sitting in made["sittings"]))
    state = "" if made["step"] == made["of"] else f" **Unfinished: {made['step']:,} of {made['of']:,} steps.**"
    asked = f"--seed {made['seed']} --factor {made['factor']:g}"
    amount = f"{made['step']:,} steps, {made['tokens']:,} tokens, {made['epochs']:g} times the training text"
    took = f"{made['seconds'] / 60:.1f} minutes and {len(made['sittings'])} sitting(s) on {devices}"
    looks = ", ".join(f"{int(step):,}: {loss:.3f}" for step, loss in made["held_out_losses"].items())
    return f"""
## Training
`python -m testbed.code.train --data DIR --out DIR {asked}`, from random weights
(standard initialisation): {amount}, in {took}.{state}
The factor is how much longer or shorter than the estimate in `recipe.py` the run was, as measured at its start. Muon on
matrices, AdamW on embeddings and norms, bfloat16 autocast. GPU arithmetic makes a repetition similar, not identical.

{_table(head, rows)}

Mean loss of the last 2,048 tokens of all held-out stretches after so many steps (nothing was chosen by it):
{looks or "not measured"}.
"""


def _data(data: dict[str, Any]) -> str:
    known = data["versions"]
    named = ", ".join(f"{name} {known[name]}" if name in known else name for name in data["packages"])
    left_out = "; ".join(f"{names} ({why})" for names, why in LEFT_OUT.items())
    held_out = ", ".join(f"{name} {known.get(name, '')}".strip() for name in HELD_OUT)
    return f"""
## Data
{data["files"]:,} Python files, {data["characters"]:,} characters, {data["tokens"]:,} tokens: sources and docstrings of
{named}; `{STANDARD_LIBRARY}` is the standard library. Files follow one another in path order, and a row never reaches
into another package. Of a large package the first files are taken. Left out: tests and vendored copies, generated files
and tables, what is there already; {left_out}.

**Held out, whole packages:** {held_out}, and one module of the standard library in ten. Training files of which a
quarter of the long lines stand in held-out files were left out too. So the texts of the claims ("sources of installed
packages", "held-out library") were not trained on.
"""


def _figure(found: dict[str, Any]) -> str:
    value, interval = found["value"], found["interval"]
    return f"{value:.3f}" + (f" ({interval[0]:.3f}–{interval[1]:.3f})" if interval else "")


def _worth(found: dict[str, Any]) -> str:
    contexts = [str(context) for context in CONTEXTS]
    names = {"all": "all", "own": "files with 8,192 tokens before the targets"}
    rows = [
        (names.get(name, name), part["files"], *(_figure(part["loss"][context]) for context in contexts),
         *(_figure(part["ratio"][context]) for context in contexts[1:]))
        for name, part in found["summary"].items()
    ]  # fmt: skip
    head = ("files of", "n", *(f"loss, {int(c):,}" for c in contexts), *(f"{int(c):,} / 512" for c in contexts[1:]))
    how = f"{found['intervals']}, a text being a file; {found['dtype']}, {found['device']}"
    return f"""
## What a longer context is worth
Loss (nats per token) on the same {found["targets"]} tokens of each held-out file with so many tokens of context, and
its ratio to the loss with 512; {how}.
`python -m testbed.code.evaluate --model testbed/code/code_model --data DIR --out FILE` makes this table.

{_table(head, rows)}
"""


def _limits(made: dict[str, Any], found: dict[str, Any]) -> str:
    ratio = found["summary"]["all"]["ratio"]["8192"]
    reached = ratio["interval"] is not None and ratio["interval"][1] < WANTED
    told = ("it is" if reached else "it is **not**, or not surely,") + f" {_figure(ratio)}"
    return f"""
## Limits
- Wanted was a loss with 8,192 tokens of context at least {1 - WANTED:.0%} below that with 512: {told}.
- It saw its texts {made["epochs"]:g} times: what it says of them is partly remembered. Judge it by held-out text only.
- It answers no questions, and was trained on Python alone. Nothing beyond {POSITIONS:,} tokens.
- One seed.
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
