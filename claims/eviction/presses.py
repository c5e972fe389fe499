"""The other side: kvpress's presses on saccade's prompts. Run by an environment that has kvpress and no saccade.

Reads and writes JSON Lines; see `exchange.py`, which this file cannot import. What is fair stands in `__init__.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values `[1, Hkv, length, d]` of every layer."""

TAIL = 65
"""Last hidden states of a context that are kept: SnapKV wants more than its window of 64."""
SHORT = 1024
"""Length of the prompt on which presses are compared with kvpress's pipeline."""
STREAMING = (0.5, 0.75, 1.0)
"""Shares of streaming heads of DuoAttention."""


@dataclass
class Cell:
    """A press at one budget under one protocol.

    Attributes:
        make: gives the press for a cache of so many tokens.
        refused: what kvpress said when it could not do that.
        layers: what the press has kept, and
        masks: which keys of each layer it hides instead, as kvpress marks them.
    """

    method: str
    protocol: str
    budget: int | None
    make: Callable[[int], Any]
    refused: str | None = None
    layers: Layers = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """What kvpress raises is the cell's result."""
        try:
            yield
        # Whatever a press cannot do, it says with its own kind of error.
        except Exception as error:
            self.refused = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def ratio(budget: int, length: int) -> float:
    """The ratio at which kvpress, which rounds down, keeps `budget` of `length` tokens."""
    return max(1 - (budget + 0.5) / length, 0.0)


def cells_of(budgets: Sequence[int]) -> list[Cell]:
    """Everything that is asked, dense attention first."""
    from kvpress import DecodingPress, DuoAttentionPress, KeyDiffPress, SnapKVPress, TOVAPress

    scorers: dict[str, Callable[[int, float], Any]] = {
        "SnapKVPress": lambda budget, share: SnapKVPress(share),
        "SnapKVPress(window_size=budget/4)": lambda budget, share: SnapKVPress(share, window_size=max(budget // 4, 1)),
        "TOVAPress": lambda budget, share: TOVAPress(share),
        "KeyDiffPress": lambda budget, share: KeyDiffPress(share),
    }
    cells = [Cell("dense", "dense", None, lambda length: None)]
    cells += [
        Cell(name, protocol, budget, _at_ratio(scorer, budget))
        for name, scorer in scorers.items()
        for protocol in ("context", "query_aware")
        for budget in budgets
    ]
    cells += [
        Cell(f"DecodingPress({base.__name__})", protocol, budget, _decoding(DecodingPress, base, budget))
        for base in (SnapKVPress, TOVAPress, KeyDiffPress)
        for protocol in ("decoding", "pipeline")
        for budget in budgets
    ]
    cells.append(Cell("DuoAttentionPress", "context", None, lambda length: DuoAttentionPress(0.5)))
    for share in STREAMING:
        name = f"DuoAttentionPress(head_compression_ratio={share:g})"
        press = DuoAttentionPress(share, on_the_fly_scoring=True)
        cells.append(Cell(name, "context", None, _always(press)))
    return cells


def _at_ratio(scorer: Callable[[int, float], Any], budget: int) -> Callable[[int], Any]:
    return lambda length: scorer(budget, ratio(budget, length))


def _decoding(kind: Any, base: Any, budget: int) -> Callable[[int], Any]:
    return lambda length: kind(base_press=base(), compression_interval=1, target_size=budget)


def _always(press: Any) -> Callable[[int], Any]:
    return lambda length: press


class Compression:
    """A forward hook behind every attention layer, through which the presses of `cells` see one dense pass.

    Args:
        past: what another one has seen of the tokens before.
    """

    def __init__(self, model: Any, cells: Sequence[Cell], length: int, past: Compression | None = None) -> None:
        self._model, self._past = model, past
        self._cells: list[tuple[Cell, Any]] = []
        self.hidden: list[Tensor] = []
        self.rotations: tuple[Tensor, Tensor] | None = None
        for cell in cells:
            with cell.attempt():
                press = cell.make(length)
                press.post_init_from_model(model)
                cell.layers, cell.masks = [], []
                self._cells.append((cell, press))

    @contextmanager
    def watching(self) -> Iterator[None]:
        hooks = [
            layer.self_attn.register_forward_hook(self._behind, with_kwargs=True) for layer in self._model.model.layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _behind(self, module: Any, arguments: Any, options: dict[str, Any], output: Any) -> None:
        # Its name since transformers 5.24, and before.
        layer = next(options[name] for name in ("cache", "past_key_values") if name in options).layers[module.layer_idx]
        hidden, rotations = options["hidden_states"], options["position_embeddings"]
        if self._past is not None:
            hidden = torch.cat((self._past.hidden[module.layer_idx], hidden), 1)
            assert self._past.rotations is not None, "the context was seen"
            rotations = tuple(torch.cat(pair, 1) for pair in zip(self._past.rotations, rotations, strict=True))
        self.hidden.append(hidden[:, -TAIL:])
        self.rotations = tuple(one[:, -TAIL:] for one in rotations)
        seen = {**options, "hidden_states": hidden, "position_embeddings": rotations}
        for cell, press in self._cells:
            if cell.refused is None:
                with cell.attempt():
                    cell.layers.append(press.compress(module, hidden, layer.keys, layer.values, None, seen))
                    cell.masks.append(getattr(module, "masked_key_indices", None))
            module.masked_key_indices = None


class Asking:
    """Answers to prompts under all cells, by one prefill of a context."""

    def __init__(self, model: Any, cells: Sequence[Cell]) -> None:
        self._model, self._cells = model, cells

    @torch.inference_mode()
    def records(self, number: int, prompts: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """A record per prompt and cell; the prompts, numbered from `number` on, have one context."""
        context = prompts[0]["context"]
        cache, compression = DynamicCache(), Compression(self._model, self._under("context"), len(context))
        with compression.watching():
            self._model.model(input_ids=torch.tensor([context]), past_key_values=cache)
        layers: list[Any] = cache.layers
        dense = [(layer.keys, layer.values) for layer in layers]
        for place, prompt in enumerate(prompts, number):
            self._with_question(dense, prompt, compression)
            for cell in self._cells:
                if cell.refused is None:
                    with cell.attempt():
                        yield self._answer(place, cell, dense, prompt)

    def _under(self, protocol: str) -> list[Cell]:
        return [cell for cell in self._cells if cell.protocol == protocol and cell.refused is None]

    def _with_question(self, dense: Layers, prompt: dict[str, Any], context: Compression) -> None:
        """Compress context and question together, as if both had been prefilled in one pass."""
        begin, question = len(prompt["context"]), prompt["question"]
        compression = Compression(self._model, self._under("query_aware"), begin + len(question), context)
        with compression.watching():
            positions = torch.arange(begin, begin + len(question))[None]
            self._model.model(input_ids=torch.tensor([question]), past_key_values=filled(dense), position_ids=positions)

    def _answer(self, place: int, cell: Cell, dense: Layers, prompt: dict[str, Any]) -> dict[str, Any]:
        begin, asked = len(prompt["context"]), [*prompt["question"], *prompt["answer_prefix"]]
        limit = prompt["max_new_tokens"]
        if cell.protocol == "query_aware":
            begin, asked = begin + len(prompt["question"]), prompt["answer_prefix"]
        if cell.protocol in ("decoding", "pipeline"):
            pieces = [[token] for token in asked] if cell.protocol == "decoding" else [asked]
            with cell.make(begin)(self._model):
                tokens, read = self._greedy(filled(dense), begin, pieces, limit)
        else:
            try:
                for layer, hidden in zip(self._model.model.layers, cell.masks, strict=False):
                    layer.self_attn.masked_key_indices = hidden
                tokens, read = self._greedy(filled(cell.layers or dense), begin, [asked], limit)
            finally:
                for layer in self._model.model.layers:
                    layer.self_attn.masked_key_indices = None
            heads = self._model.config.num_key_value_heads * len(dense)
            read -= sum(len(hidden[0]) for hidden in cell.masks if hidden is not None) / heads
        return {**_name(cell), "prompt": place, "read": round(read, 3), "tokens": tokens}

    def _greedy(self, cache: Any, begin: int, pieces: list[list[int]], limit: int) -> tuple[list[int], float]:
        """Feed pieces at positions from `begin` on and go on greedily.

        Returns the tokens and, mean over layers, how many the cache holds when the first of them is chosen.
        """
        tokens: list[int] = []
        read = 0.0
        ends = self._model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        while pieces:
            piece = pieces.pop(0)
            positions = torch.arange(begin, begin + len(piece))[None]
            begin += len(piece)
            logits = self._model(
                input_ids=torch.tensor([piece]), past_key_values=cache, position_ids=positions, logits_to_keep=1
            ).logits
            if not pieces:
                read = read or sum(layer.keys.shape[2] for layer in cache.layers) / len(cache.layers)
                tokens.append(int(logits[0, -1].argmax()))
                if len(tokens) < limit and tokens[-1] not in ends:
                    pieces.append(tokens[-1:])
        return tokens, read


def filled(layers: Layers) -> Any:
    """A cache that holds these keys and values."""
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return cache


def compared_with_pipeline(
    model: Any, tokenizer: Any, prompt: dict[str, Any], budgets: Sequence[int]
) -> dict[str, Any]:
    """How often a short prompt's answer is what kvpress's own pipeline says."""
    from kvpress import KVPressTextGenerationPipeline

    pipeline = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    cells = {json.dumps(_name(cell)): cell for cell in cells_of(budgets)}
    short = {**prompt, "context": prompt["context"][-SHORT:]}
    compared = same = 0
    different = []
    for record in Asking(model, list(cells.values())).records(0, [short]):
        cell = cells[json.dumps({key: record[key] for key in ("method", "protocol", "budget")})]
        if cell.protocol == "decoding":
            continue  # the pipeline cannot feed a question token by token
        context, rest = short["context"], [*short["question"], *short["answer_prefix"]]
        if cell.protocol == "query_aware":
            context, rest = [*context, *short["question"]], short["answer_prefix"]
        inputs = {"context_ids": torch.tensor([context]), "questions_ids": [torch.tensor([rest])]}
        press, limit = cell.make(len(context)), short["max_new_tokens"]
        with torch.inference_mode():
            said = pipeline._forward(inputs, max_new_tokens=limit, press=press)[0]
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
        compared += 1
        if said == tokenizer.decode(record["tokens"], skip_special_tokens=True):
            same += 1
        else:
            different.append(_name(cell))
    return {"context": len(short["context"]), "compared": compared, "same": same, "different": different}


def replace_booksum(texts: Sequence[str]) -> None:
    """Let DuoAttention score heads on these texts: its own come from a hub."""
    from datasets import Dataset
    from kvpress.presses import duo_attention_press

    chapters = Dataset.from_dict({"chapter": list(texts)})
    duo_attention_press.load_dataset = lambda *arguments, **options: chapters


def _name(cell: Cell) -> dict[str, Any]:
    return {"method": cell.method, "protocol": cell.protocol, "budget": cell.budget}


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("prompts", "texts", "answers"):
        parser.add_argument(name, type=Path)
    parser.add_argument("model")
    parser.add_argument("--budgets", type=int, nargs="+", required=True)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    found = {name: version(name) for name in ("kvpress", "torch", "transformers")}
    prompts = _lines(given.prompts)
    replace_booksum(_lines(given.texts))
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    cells = cells_of(given.budgets)
    with given.answers.open("w", encoding="utf-8") as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        write({"versions": {"python": platform.python_version(), **found}})
        write({"pipeline": compared_with_pipeline(model, tokenizer, prompts[0], given.budgets)})
        done = 0
        for _, group in groupby(prompts, key=lambda prompt: prompt["context"]):
            same = list(group)
            for record in Asking(model, cells).records(done, same):
                write(record)
            done += len(same)
            sys.stderr.write(f"kvpress: {done} of {len(prompts)} prompts\n")
        for cell in cells:
            if cell.refused is not None:
                # kvpress names a model by the folder it was loaded from.
                write({**_name(cell), "refused": cell.refused.replace(str(given.model), "(this model)")})


if __name__ == "__main__":
    main()
