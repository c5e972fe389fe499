"""The ways in which people generate: name -> what a model is called with."""

import copy
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel, StaticCache, set_seed

import saccade
from walking import crossed, in_turn

from . import tiny

Way = Callable[[PreTrainedModel], torch.Tensor]

NEW = 7
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
ENDLESS: dict[str, Any] = {} if VERSION >= (5,) else {"eos_token_id": -1}
"""Without a token that ends a text stock of transformers 4 looks nothing up; this one is none."""


def needs_5(words: str) -> pytest.MarkDecorator:
    """For a test of what is refused on transformers 4: there it must end with that refusal, in these words."""
    refusal = pytest.RaisesExc(saccade.UnsupportedModelError, match=words)
    return pytest.mark.xfail(VERSION < (5,), raises=refusal, strict=True, reason=words)


NO_LENGTH = "a graph needs a cache that keeps its length on the device, as transformers 5 does"
ON_DEVICE = needs_5(NO_LENGTH)
STATIC_RECTIFIED = needs_5("rectification on a StaticCache needs transformers 5")


def on_device(words: str) -> str:
    """Why a call on lengths of the device is refused: on transformers 4 since there are none."""
    return words if VERSION >= (5,) else NO_LENGTH


def generate(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    set_seed(3)
    options = {"input_ids": tiny.prompt(), "do_sample": False, "max_new_tokens": NEW, **options}
    return model.generate(**options)


def assisted(model: PreTrainedModel) -> torch.Tensor:
    drafter = copy.copy(assistant())
    # Stock notes there what it learns about drafts, and another test is not to go on with it.
    drafter.generation_config = copy.deepcopy(drafter.generation_config)
    return generate(model, assistant_model=drafter)


@functools.cache
def assistant() -> PreTrainedModel:
    """The model under test with a little noise: it agrees often, but not always."""
    other = tiny.fresh("llama")
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    return other


def prefilled_plain_cache(model: PreTrainedModel) -> torch.Tensor:
    """The cache comes from a stock call of another model object with the same weights."""
    stock, ids = tiny.fresh("llama"), tiny.prompt()
    with torch.no_grad():
        cache = stock(ids[:, :-1], use_cache=True, past_key_values=DynamicCache()).past_key_values
    return generate(model, input_ids=ids, past_key_values=cache)


def several_turns(model: PreTrainedModel, cache: DynamicCache | None = None) -> torch.Tensor:
    cache = DynamicCache() if cache is None else cache
    first = generate(model, past_key_values=cache)
    ids = torch.cat((first, tiny.prompt(7, seed=5)), dim=1)
    # Without a mask, transformers takes a generated token that happens to be the pad token for padding.
    return generate(model, input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache)


def new_turn_alone(model: PreTrainedModel) -> torch.Tensor:
    """The second call passes only the new tokens and the mask of everything, which transformers allows."""
    cache = DynamicCache()
    generate(model, past_key_values=cache)
    new = tiny.prompt(7, seed=5)
    mask = torch.ones((1, cache.get_seq_length() + 7), dtype=torch.long)
    return generate(model, input_ids=new, attention_mask=mask, past_key_values=cache)


WAYS: dict[str, Way] = {
    "greedy": generate,
    "sampling": functools.partial(generate, do_sample=True, temperature=1.3),
    "beams": functools.partial(generate, num_beams=3, repetition_penalty=2.0),
    "beam sampling": functools.partial(generate, num_beams=3, do_sample=True),
    "several returned": functools.partial(generate, do_sample=True, num_return_sequences=3),
    "several returned beams": functools.partial(generate, num_beams=4, num_return_sequences=2, repetition_penalty=2.0),
    "left-padded": lambda model: generate(model, **tiny.padded([30, 7, 19])),
    "left-padded beams": lambda model: generate(model, **tiny.padded([12, 7]), num_beams=2),
    "chunked prefill": functools.partial(generate, prefill_chunk_size=7),
    "prompt lookup": functools.partial(generate, prompt_lookup_num_tokens=4, max_matching_ngram_size=1, **ENDLESS),
    "assisted": assisted,
    "static cache": functools.partial(generate, cache_implementation="static"),
    "static cache, left-padded": lambda model: generate(model, **tiny.padded([30, 7]), cache_implementation="static"),
    "static cache, beams": functools.partial(
        generate, cache_implementation="static", num_beams=3, repetition_penalty=2.0
    ),
    "prefilled plain cache": prefilled_plain_cache,
    "several turns": several_turns,
    "new turn alone": new_turn_alone,
    "embeddings": lambda model: generate(
        model, input_ids=None, inputs_embeds=model.get_input_embeddings()(tiny.prompt()).detach()
    ),
    "by hand": lambda model: tiny.by_hand(model, tiny.prompt(), NEW),
    "by hand, left-padded": lambda model: tiny.by_hand(
        model, (batch := tiny.padded([30, 7, 19]))["input_ids"], NEW, attention_mask=batch["attention_mask"]
    ),
    "by hand, static": lambda model: tiny.by_hand(
        model, tiny.prompt(), NEW, StaticCache(config=model.config, max_cache_len=50)
    ),
}
if VERSION < (5,):
    # Stock itself ends with an error there.
    del WAYS["new turn alone"]


def offered(*names: str) -> list[str]:
    """Those that this transformers has."""
    return [name for name in names if name in WAYS]


INDEXED = ("quest", "lychee_cluster")
"""Bounds of pages and an index of its own, which a cache carries along: in every way, every time."""
BARE = ("streaming", "tidal", "less_is_more")
"""A window, a published set, a union of queries: one of them in each way."""
HARD = ("beams", "left-padded", "assisted")


def every_time(policy: str, way: str) -> bool:
    """Indexes in every way, one of the bare in each, and what is neither in the hard ones."""
    return policy in (*INDEXED, BARE[list(WAYS).index(way) % len(BARE)]) or (way in HARD and policy not in BARE)


def by_kind(policies: Iterable[str], ways: Collection[str] = WAYS.keys(), also: Collection[str] = ()) -> list[Any]:
    """Pairs: one policy of each kind, and those named `also`, in all ways; each other in a hard one."""
    policies, kinds = list(policies), {*INDEXED, *BARE, *also}
    everywhere = crossed((one for one in policies if one in kinds), ways, every_time)
    return [*everywhere, *in_turn((one for one in policies if one not in kinds), (way for way in HARD if way in ways))]


def paired(rows: Iterable[Any], columns: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Pairs in which every row and every column comes at least once."""
    rows, columns = list(rows), list(columns)
    return [(rows[at % len(rows)], columns[at % len(columns)]) for at in range(max(len(rows), len(columns)))]
