"""Rectification inside plain generation: what was decoded sparsely is rewritten densely."""

import functools
from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import saccade

from . import tiny
from .rectified import EVERY, NEW, SMALLEST, clean_slots_are_dense, exact_twin, specs
from .ways import STATIC_RECTIFIED, WAYS, generate

PADDED = tiny.padded([30, 7, 19])
STATIC = {"cache_implementation": "static"}


REWRITTEN_WAYS: dict[str, Callable[[PreTrainedModel], torch.Tensor]] = {
    "greedy": functools.partial(generate, max_new_tokens=NEW),
    "beams": functools.partial(generate, max_new_tokens=NEW, num_beams=3, repetition_penalty=2.0),
    "several returned": functools.partial(generate, max_new_tokens=NEW, do_sample=True, num_return_sequences=3),
    "left-padded beams": functools.partial(generate, max_new_tokens=NEW, num_beams=2, **PADDED),
    "static cache": functools.partial(generate, max_new_tokens=NEW, **STATIC),
    "static cache, left-padded beams": functools.partial(generate, max_new_tokens=NEW, num_beams=2, **PADDED, **STATIC),
    "chunked prefill": functools.partial(generate, max_new_tokens=NEW, prefill_chunk_size=7),
    "assisted": WAYS["assisted"],
    "several turns": WAYS["several turns"],
    "by hand": lambda model: tiny.by_hand(model, tiny.prompt(), NEW),
    "by hand, static": lambda model: tiny.by_hand(
        model, tiny.prompt(), NEW, StaticCache(config=model.config, max_cache_len=60)
    ),
}


def wanted(policy: str, way: str) -> bool:
    """Bounds in the cache and an index beside it in every way; what keeps nothing, or the same bounds, by hand."""
    return policy in ("quest", "lychee_cluster") or way == "by hand, static"


CASES = [(policy, way) for policy in SMALLEST for way in REWRITTEN_WAYS if wanted(policy, way)]


@pytest.mark.parametrize(("policy", "way"), CASES)
def test_rewritten_keys_and_values_are_those_of_a_dense_prefill(
    policy: str, way: str, request: pytest.FixtureRequest
) -> None:
    """In float64: a pass attends to clean slots only, and in float64 as stock does."""
    if "static" in way:
        request.applymarker(STATIC_RECTIFIED)
    model = tiny.fresh().double()
    with saccade.sparsify(model, specs(EVERY)[policy]) as run, clean_slots_are_dense(run, exact_twin()) as checked:
        REWRITTEN_WAYS[way](model)
        done = run.stats()
    # Assistants send several tokens at once, and a turn runs what it finds: so a pass may have fewer to run again.
    least = 1 if way in ("assisted", "several turns") else EVERY
    assert done.dense_passes >= 1 and done.rectifications >= done.dense_passes * least
    assert max(checked) > 30


def test_rectification_changes_what_is_generated() -> None:
    """Otherwise nothing above would be tested: a polluted cache gives other logits than a rewritten one."""
    logits = []
    # A window over decoded tokens: sinks and the current token alone are never polluted.
    for spec in ("streaming:budget=12,rectify=3", "streaming:budget=12"):
        with saccade.sparsify(tiny.llama(), spec), torch.no_grad():
            cache = DynamicCache()
            tiny.llama()(tiny.prompt(), past_key_values=cache)
            for token in tiny.prompt(9, seed=4)[0]:
                out = tiny.llama()(token[None, None], past_key_values=cache)
            logits.append(out.logits)
    assert (logits[0] - logits[1]).abs().max() > 1e-3
