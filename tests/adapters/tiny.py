"""Tiny random models of the supported families, and the policies they are run under."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, StaticCache

import saccade

VOCABULARY = 64

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large weights: attention that picks few tokens, logits that depend on it.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

LARGE = 250
"""A budget above every context in these tests, and no multiple of a page."""

SMALL = {
    **{"page": 4, "dense_layers": 1, "reselect": 3, "roles": "every:2", "min_pages": 100},
    **{"chunk_min": 2, "chunk_max": 4, "budget": "{budget}"},
}
"""Options for these models, for every method that has them."""


FLOOR = ("quest", "min_pages")


def small(method: saccade.Method) -> str:
    """A method's spec with `{budget}` for its budget, if it has one."""
    # A floor of pages is what makes `resa` cover everything; `quest` has a budget for that.
    told = (
        f"{name}={value}" for name, value in SMALL.items() if name in method.defaults and (method.name, name) != FLOOR
    )
    return ":".join(filter(None, (method.name, ",".join(told))))


COVERING = {
    **{name: small(method) for name, method in saccade.policies().items() if method.compared},
    "quest-query": "quest:page=4,heads=query,dense_layers=0,budget={budget}",
    "tidal-query": "tidal:reselect=,dense_layers=1,heads=query,budget={budget}",
    "tidal, rectified": "tidal:reselect=3,dense_layers=1,budget={budget},rectify=3",
    "resa": "resa:page=4,min_pages=100,rectify=3",
}
"""Every method, so that it attends to everything."""

OWN_INDEX = ("lychee_cluster", "token_clusters")
POLICIES = [name for name in COVERING if name not in ("tidal, rectified", "lychee_decode", "resa", *OWN_INDEX)]
SPARSE = [name for name in POLICIES if name != "dense"]
"""Policies whose sets depend on one layer's queries and keys: `checking` recomputes them wherever they are chosen."""


def spec(name: str, budget: int = LARGE) -> str:
    return COVERING[name].format(budget=budget)


def fresh(kind: str = "llama", seed: int = 0, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
    """A new random model of a transformers model type, in eval mode; sizes set to `...` are left to the family."""
    torch.manual_seed(seed)
    sizes = {name: size for name, size in {**SIZES, **changes}.items() if size is not ...}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@functools.cache
def llama(seed: int = 0) -> PreTrainedModel:
    """A shared Llama; tests that attach to it must restore it."""
    return fresh("llama", seed)


def prompt(length: int = 30, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Tokens with repeats, so that prompt lookup finds n-grams."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(2, 14, (rows, length - length // 2), generator=generator)
    return torch.cat((words, words), dim=1)[:, :length]


CLUSTERS = "lychee_cluster:sinks=2,chunk_min=2,chunk_max=4,buffer=3,dense_layers=1,budget=16"


class Letters:
    """A tokenizer whose token i is written as a letter, every third one followed by a delimiter."""

    def __len__(self) -> int:
        return VOCABULARY

    def batch_decode(self, tokens: list[list[int]], **options: Any) -> list[str]:
        return ["x" + (",. \n"[token // 3 % 4] if token % 3 == 0 else "") for (token,) in tokens]


LETTERS = Letters()


def said(model: PreTrainedModel, **inputs: Any) -> list[int]:
    """Greedy tokens behind a prompt of 40."""
    tokens: list[int] = model.generate(prompt(40), max_new_tokens=6, do_sample=False, **inputs)[0, 40:].tolist()
    return tokens


def answered(model: Any, ids: torch.Tensor | None = None, new: int = 8, **options: Any) -> list[list[int]]:
    """A text and its greedy continuation, under a mask that hides nothing."""
    ids = prompt() if ids is None else ids
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": new, **options}
    tokens: list[list[int]] = model.generate(input_ids=ids, **given).tolist()
    return tokens


@contextmanager
def raising(module: Any, error: BaseException) -> Iterator[None]:
    """Inside, a call of a module raises."""

    def stop(*given: Any) -> None:
        raise error

    hook = module.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        hook.remove()


def padded(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """A left-padded batch."""
    width = max(lengths)
    ids = torch.zeros((len(lengths), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = prompt(length, seed=seed + row)[0]
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def by_hand(model: PreTrainedModel, ids: torch.Tensor, new: int, cache: Any = None, **inputs: Any) -> torch.Tensor:
    """A hand-written greedy loop; `cache` may already hold a part of the prompt."""
    past = 0 if cache is None else int(cache.get_seq_length())
    step = ids[:, past:]
    mask = inputs.get("attention_mask")
    # A static cache of transformers 4 counts keys that are not 0, as that of a padding token is.
    counts = isinstance(cache, StaticCache) and "cache_position" in inspect.signature(model.forward).parameters
    for _ in range(new):
        at = {"cache_position": torch.arange(ids.shape[1] - step.shape[1], ids.shape[1])} if counts else {}
        out = model(step, past_key_values=cache, use_cache=True, attention_mask=mask, **at)
        cache, step = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat((ids, step), dim=1)
        mask = None if mask is None else torch.cat((mask, torch.ones_like(step)), dim=1)
    return ids
