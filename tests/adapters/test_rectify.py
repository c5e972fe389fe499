"""Rectification inside plain generation: what was decoded sparsely is rewritten densely."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import saccade
from walking import crossed

from . import tiny
from .rectified import EVERY, NEW, SMALLEST, Numbers, exact_twin, numbers, specs, twin
from .ways import STATIC_RECTIFIED, WAYS, generate

KINDS = ("quest", "lychee_cluster")
"""Bounds in the cache, and an index beside it: these are looked at in every way, every time."""


@contextmanager
def clean_cache_is_dense(run: saccade.Run, mask: torch.Tensor | None = None) -> Iterator[list[int]]:
    """After every forward call, the clean slots hold what a dense prefill of the same tokens gives; yields counts.

    They may be no further from float64 than four times what float32 makes of the prefill itself.
    """
    model, checked = tiny.llama(), []

    def check(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        session, cache = run._hook.latest.session, kwargs.get(run._hook.kept)
        if cache is None:
            return
        clean = min(session.final.boundary, int(cache.get_seq_length()))
        ids = session.state.history.ids(0, clean)
        assert ids is not None
        visible = torch.ones_like(ids) if mask is None else _wider(mask, ids)
        stock, exact = prefilled(numbers(ids), numbers(visible))
        padding = ~visible.bool()[:, None, :, None]
        for layer, *others in zip(cache.layers, stock, exact, strict=True):
            for name in ("keys", "values"):
                ours, rounded, wanted = (getattr(one, name)[:, :, :clean] for one in (layer, *others))
                far, allowed = ((one - wanted).masked_fill(padding, 0.0).abs().max() for one in (ours, rounded))
                assert far <= 4 * allowed, f"{float(far)} of {4 * float(allowed)} at {clean} clean slots"
        checked.append(clean)

    handle = model.get_decoder().register_forward_hook(check, with_kwargs=True)
    try:
        yield checked
    finally:
        handle.remove()


@functools.lru_cache(maxsize=64)
@torch.no_grad()
def prefilled(ids: Numbers, visible: Numbers) -> list[list[Any]]:
    """Layers of stock's cache, and those in float64; between two passes what is clean stays the same."""
    mask = torch.tensor(visible)
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return [one(torch.tensor(ids), **given).past_key_values.layers for one in (twin(), exact_twin())]


def _wider(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The prompt's mask for every beam, and ones for what was generated."""
    rows = mask.repeat_interleave(ids.shape[0] // mask.shape[0], dim=0)
    return torch.nn.functional.pad(rows, (0, ids.shape[1] - mask.shape[1]), value=1)[:, : ids.shape[1]]


REWRITTEN_WAYS: dict[str, Callable[[PreTrainedModel], torch.Tensor]] = {
    "greedy": functools.partial(generate, max_new_tokens=NEW),
    "sampling": functools.partial(generate, max_new_tokens=NEW, do_sample=True, temperature=1.5),
    "beams": functools.partial(generate, max_new_tokens=NEW, num_beams=3, repetition_penalty=2.0),
    "several returned": functools.partial(generate, max_new_tokens=NEW, do_sample=True, num_return_sequences=3),
    "static cache": functools.partial(generate, max_new_tokens=NEW, cache_implementation="static"),
    "static cache, beams": functools.partial(
        generate, max_new_tokens=NEW, cache_implementation="static", num_beams=2, repetition_penalty=2.0
    ),
    "chunked prefill": functools.partial(generate, max_new_tokens=NEW, prefill_chunk_size=7),
    "assisted": WAYS["assisted"],
    "several turns": WAYS["several turns"],
    "by hand": lambda model: tiny.by_hand(model, tiny.prompt(), NEW),
    "by hand, static": lambda model: tiny.by_hand(
        model, tiny.prompt(), NEW, StaticCache(config=model.config, max_cache_len=60)
    ),
}


@pytest.mark.parametrize(
    ("policy", "way"), crossed(SMALLEST, REWRITTEN_WAYS, lambda name, way: name in KINDS or "hand" in way)
)
def test_rewritten_keys_and_values_are_those_of_a_dense_prefill(
    policy: str, way: str, request: pytest.FixtureRequest
) -> None:
    model = tiny.llama()
    if "static" in way:
        request.applymarker(STATIC_RECTIFIED)
    with saccade.sparsify(model, specs(EVERY)[policy]) as run, clean_cache_is_dense(run) as checked:
        REWRITTEN_WAYS[way](model)
        done = run.stats()
    # Assistants send several tokens at once, so that a pass comes before there are `EVERY` to run again.
    least = 1 if way == "assisted" else EVERY
    assert done.dense_passes >= 1 and done.rectifications >= done.dense_passes * least
    assert max(checked) > 30


@pytest.mark.parametrize("static", [False, pytest.param(True, marks=STATIC_RECTIFIED)])
@pytest.mark.parametrize(("policy", "beams"), crossed(SMALLEST, (1, 2), lambda name, count: name in KINDS or count > 1))
def test_left_padded_rows_are_rewritten_too(policy: str, beams: int, static: bool) -> None:
    model, batch = tiny.llama(), tiny.padded([30, 7, 19])
    options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
    with (
        saccade.sparsify(model, specs(EVERY)[policy]) as run,
        clean_cache_is_dense(run, batch["attention_mask"]) as checked,
    ):
        generate(model, **batch, max_new_tokens=NEW, num_beams=beams, **options)
        assert run.stats().dense_passes >= 2
    assert max(checked) > 30


@pytest.mark.parametrize("policy", SMALLEST)
def test_a_row_is_rectified_as_if_alone(policy: str) -> None:
    model, batch = tiny.llama(), tiny.padded([30, 17, 23])
    with saccade.sparsify(model, specs(EVERY)[policy]):
        together = generate(model, **batch, max_new_tokens=NEW)
        for row, mask in enumerate(batch["attention_mask"].bool()):
            alone = generate(model, input_ids=batch["input_ids"][row, mask][None], max_new_tokens=NEW)
            assert together[row, -NEW:].tolist() == alone[0, -NEW:].tolist()


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
