"""Settings of calibrations on a tiny random model in a folder, and a task that it can do."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from commands import write_model
from saccade.adapters.hf.support import decoder_of
from saccade.calibrate import heads, layers, tune
from saccade.calibrate.target import TargetSettings
from saccade.checkpoints.load import ModelSource

POSITIONS = 760
TOGETHER = 32
"""Questions that are tried in one call."""
UNLUCKY = 4
"""A text about which thousands of questions would be tried."""


def make_model(folder: Path, *, kv_heads: int = 4, layers: int = 5, seed: int = 0) -> Path:
    """Random weights in a folder, with the bundled model's tokenizer; 4 query heads of the size that says words."""
    return write_model(folder, POSITIONS, kv_heads=kv_heads, layers=layers, dim=8, seed=seed)


def make_task(folder: Path, path: Path, *, texts: int = 3, asked: int = 2, ragged: bool = False) -> Path:
    """Questions that the model in `folder` answers right: the answer is the word it would say."""
    source = ModelSource.locate(folder)
    tokenizer, model = source.tokenizer(), AutoModelForCausalLM.from_pretrained(folder).eval()
    lines: list[str] = []

    @torch.no_grad()
    def said(rows: list[list[int]]) -> list[str]:
        """What comes behind each row; those that are shorter are padded behind, which no token before sees."""
        longest, ends = max(map(len, rows)), [len(row) - 1 for row in rows]
        states = decoder_of(model)(torch.tensor([row + [0] * (longest - len(row)) for row in rows])).last_hidden_state
        logits = model.get_output_embeddings()(states[range(len(rows)), ends])
        return [tokenizer.decode([token]) for token in logits.argmax(-1).tolist()]

    for text in range(texts):
        number = text + (text >= UNLUCKY)
        context = " ".join(f"Text {number} says that word {word} comes before word {word + 1}." for word in range(8))
        found: list[str] = []
        first, wanted = 1, asked - (1 if ragged and text == texts - 1 else 0)
        while len(found) < wanted:
            asking = [f"{number} and {other}?" for other in range(first, first + TOGETHER)]
            told = [f"{context}\n\nQuestion: {question}\nAnswer:" for question in asking]
            rows = [tokenizer(one, add_special_tokens=False)["input_ids"] for one in told]
            for question, row, answer in zip(asking, rows, said(rows), strict=True):
                if len(found) == wanted:
                    break
                word = answer.startswith(" ") and answer.strip() == answer[1:] and len(answer) > 2
                # Alone the row may be rounded otherwise.
                if word and answer.isprintable() and said([row]) == [answer]:
                    found.append(json.dumps({"context": context, "question": question, "answer": answer[1:]}))
            first += TOGETHER
        lines += found
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@torch.no_grad()
def guessed_task(folder: Path, path: Path, start: tuple[int, ...] = (), *, benchmark: bool = False) -> Path:
    """Three texts: of two questions one is answered without the text, then one that is, then one that is not.

    `start`: what the tokenizer puts before a text.
    """
    tokenizer, model = ModelSource.locate(folder).tokenizer(), AutoModelForCausalLM.from_pretrained(folder).eval()

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def line(context: str, question: str, answer: str) -> str:
        row = {"context": context, "question": question, "answer": answer}
        return json.dumps(row | ({"answer_prefix": "It is", "max_new_tokens": 4} if benchmark else {}))

    def guess(question: str) -> str | None:
        """The word that the model says to a question alone; None if it says no word."""
        told = encode(f"{question}\nIt is" if benchmark else f"\n\nQuestion: {question}\nAnswer:")
        said = tokenizer.decode([int(model(torch.tensor([[*start, *told]])).logits[0, -1].argmax())])
        return said.strip() if said[:1] == " " and len(encode(f" {said.strip()}")) == 1 and said.strip() else None

    asked = (f"What of {number}?" for number in range(1000))
    known = list(islice(((one, word) for one in asked if (word := guess(one))), 4))
    wrong = [(question, "the" if own != "the" else "a") for question, own in known]
    lines = [line("Of two.", *known[0]), line("Of two.", *wrong[1]), line("Of one.", *known[2])]
    path.write_text("\n".join([*lines, line("Another.", *wrong[3])]), encoding="utf-8")
    return path


def divided(folder: Path | None, output: Path, changes: dict[str, Any]) -> tuple[TargetSettings, dict[str, Any]]:
    """What all calibrations share, and what is left of the changes."""
    usual: dict[str, Any] = {
        "model": None if folder is None else str(folder), "task": "kv", "context": 200, "questions": 6,
        "output_dir": output, "recipe": None, "device": "cpu", "dtype": "auto", "seed": 0, "threads": 1,
    }  # fmt: skip
    names = TargetSettings.__dataclass_fields__
    shared = {**usual, **{name: value for name, value in changes.items() if name in names}}
    return TargetSettings(**shared), {name: value for name, value in changes.items() if name not in names}


def head_settings(folder: Path | None, output: Path, **changes: Any) -> heads.HeadSettings:
    shared, own = divided(folder, output, changes)
    usual: dict[str, Any] = {"methods": "direct", "target_heads": 8, "exact": False, "drop_known": False}
    usual |= {"steps": 3, "lengths": (128, 160), "budgets": "16,32"}
    return heads.HeadSettings(shared, **{**usual, **own})


def layer_settings(folder: Path | None, output: Path, **changes: Any) -> layers.LayerSettings:
    shared, own = divided(folder, output, changes)
    return layers.LayerSettings(shared, **{"policy": "tidal", "budgets": "16,32", "most": 1, "passages": 2, **own})


def probe_settings(folder: Path | None, output: Path, **changes: Any) -> layers.LayerSettings:
    return layer_settings(folder, output, **{**changes, "task": ""})


def tune_settings(folder: Path | None, output: Path, **changes: Any) -> tune.TuneSettings:
    """By key tokens, or by answers to a `task`."""
    shared, own = divided(folder, output, {"task": "", **changes})
    options: dict[str, Any] = {"policies": ("streaming", "quest:page=4"), "budgets": "16,32"}
    options |= {"quality": 0.1} if shared.task else {"agreement": 0.1}
    return tune.TuneSettings(shared, **{**options, **own})
