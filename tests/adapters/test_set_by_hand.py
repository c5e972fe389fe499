"""What libraries and users do to a cache between calls: keys set by hand, lengths that differ, masks that add."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

import saccade

from . import tiny
from .tiny import answered, fresh, prompt
from .ways import VERSION

EXACT = {
    **{name: tiny.spec(name) for name in tiny.COVERING},
    "verified": "tidal:reselect=3,dense_layers=1,budget=250,rectify=3:verify",
}
"""Every method so that it attends to everything: what it makes of a changed cache is what stock makes of it."""
KINDS = ("less_is_more", "quest", "lychee_cluster", "tidal, rectified", "verified")
"""What keeps nothing beside the cache, bounds of pages, an index of its own, and both modes of passes."""
LATER = torch.tensor([[5], [9], [2], [11], [7], [3], [12]])
"""Tokens of further steps."""


@torch.no_grad()
def steps(model: Any, cache: Any, first: int, change: Callable[[Any], None] | None = None, at: int = 3) -> torch.Tensor:
    """Logits `[n, V]` of one-token calls from position `first` on; `change` the cache ahead of number `at`."""
    logits = []
    for number, token in enumerate(LATER):
        if change is not None and number == at:
            change(cache)
        place = torch.tensor([[first + number]])
        logits.append(model(token[None], past_key_values=cache, position_ids=place).logits[0, -1])
    return torch.stack(logits)


def every_second(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, ::2].contiguous(), layer.values[:, :, ::2].contiguous()


def other_values(cache: Any) -> None:
    """As quantising and back does; the length is as before."""
    for layer in cache.layers:
        layer.values = (layer.values * 4).round() / 4


def shorter_views(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :17], layer.values[:, :, :17]


CHANGES = [every_second, other_values, shorter_views]


@torch.no_grad()
def changed() -> list[torch.Tensor]:
    """Logits behind every change, of the shared model as it is now."""
    found = []
    for change in CHANGES:
        cache = DynamicCache()
        tiny.llama()(prompt(40), past_key_values=cache)
        change(cache)
        found.append(steps(tiny.llama(), cache, 40, change))
    return found


stock_changed = functools.cache(changed)


@pytest.mark.parametrize("policy", KINDS)
def test_keys_set_by_hand_are_those_that_are_read(policy: str) -> None:
    """Behind a prompt and again between steps."""
    expected = stock_changed()
    with saccade.sparsify(tiny.llama(), EXACT[policy]):
        torch.testing.assert_close(changed(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("policy", ["quest", "less_is_more", "tidal, rectified", "verified"])
@torch.no_grad()
def test_a_press_in_every_layer_of_the_prompt(policy: str) -> None:
    """kvpress sets a layer's keys in a hook behind its attention, while the prompt's call goes on."""
    model = tiny.llama()

    def press(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        cache = next(value for value in kwargs.values() if isinstance(value, DynamicCache))
        layer = cache.layers[module.layer_idx]
        kept = layer.keys.norm(dim=-1).topk(21, dim=-1).indices.sort().values[..., None].expand(-1, -1, -1, 8)
        layer.keys, layer.values = layer.keys.gather(2, kept), layer.values.gather(2, kept)

    def run() -> torch.Tensor:
        hooks = [one.self_attn.register_forward_hook(press, with_kwargs=True) for one in model.model.layers]
        cache = DynamicCache()
        try:
            model(prompt(40), past_key_values=cache)
        finally:
            for hook in hooks:
                hook.remove()
        assert cache.get_seq_length() == 21
        return steps(model, cache, 40)

    expected = run()
    with saccade.sparsify(model, EXACT[policy]):
        torch.testing.assert_close(run(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("policy", ["quest:page=4,budget=8", "lychee_cluster:chunk_min=2,chunk_max=4,budget=24"])
@torch.no_grad()
def test_an_index_begins_anew_with_keys_set_by_hand(policy: str) -> None:
    """Sets are those of a cache that a new run finds like that."""
    model = tiny.llama()
    with saccade.sparsify(model, policy):
        cache = DynamicCache()
        model(prompt(80), past_key_values=cache)
        steps(model, cache, 80)
        every_second(cache)
        found = DynamicCache()
        for number, layer in enumerate(cache.layers):
            found.update(layer.keys.clone(), layer.values.clone(), number)
        here = steps(model, cache, 87)
    with saccade.sparsify(model, policy):
        assert torch.equal(here, steps(model, found, 87))


@torch.no_grad()
def test_a_static_cache_that_was_given_other_tensors() -> None:
    """Its index begins anew: sets are those of a new run on the same keys."""
    model = tiny.llama()
    cache = StaticCache(config=model.config, max_cache_len=64)

    def call(ids: torch.Tensor, past: int) -> torch.Tensor:
        at = torch.arange(past, past + ids.shape[1])
        more = {} if VERSION >= (5,) else {"cache_position": at}
        logits: torch.Tensor = model(ids, past_key_values=cache, position_ids=at[None], **more).logits[0, -1]
        return logits

    with saccade.sparsify(model, "quest:page=4,budget=8"):
        call(prompt(40), 0)
        call(LATER[:1], 40)
        for layer in cache.layers:
            layer.keys = torch.cat((layer.keys[:, :, :41].flip(2), layer.keys[:, :, 41:]), dim=2)
        here = call(LATER[1:2], 41)
    for layer in cache.layers:
        if VERSION >= (5,):
            layer.cumulative_length.fill_(41)
        layer.keys[:, :, 41] = 0
    with saccade.sparsify(model, "quest:page=4,budget=8"):
        assert torch.equal(here, call(LATER[1:2], 41))


@torch.no_grad()
def test_keys_and_values_of_different_lengths_are_refused() -> None:
    model = tiny.llama()
    with saccade.sparsify(model, "quest:page=4,budget=8"):
        cache = DynamicCache()
        model(prompt(40), past_key_values=cache)
        cache.layers[2].keys = cache.layers[2].keys[:, :, :30]
        with pytest.raises(saccade.UnsupportedModelError, match=r"layer 2 of the cache has keys \[1, 2, 30\], values"):
            model(prompt(1), past_key_values=cache)


@pytest.mark.parametrize(
    ("policy", "here"), [("quest:page=4,budget=8", True), ("exact_topk:budget=8,rectify=3", False)]
)
@torch.no_grad()
def test_layers_of_different_lengths_are_refused_each_time(policy: str, here: bool) -> None:
    """Also where one layer alone was cropped, by its own method; nothing of the cache has changed then."""
    model = tiny.llama()
    cache = DynamicCache()
    if not here:
        model(prompt(40), past_key_values=cache)
    with saccade.sparsify(model, policy):
        if here:
            model(prompt(40), past_key_values=cache)
        cache.layers[1].crop(-7)
        for _ in range(2):
            with pytest.raises(saccade.UnsupportedModelError, match="33 tokens in a layer and 40 in another"):
                model(prompt(1), past_key_values=cache)
            assert [layer.get_seq_length() for layer in cache.layers] == [40, 33, 40, 40]
        cache.layers[1].keys, cache.layers[1].values = (torch.zeros(1, 2, 40, 8) for _ in range(2))
        model(prompt(1), past_key_values=cache)


def causal(past: int, new: int, hides: float, bias: float = 0.0) -> torch.Tensor:
    """A mask to add for `new` queries, `[1, 1, new, T]`; `bias` on the tokens at the end, the queries' own left out."""
    slots = torch.arange(past + new)
    mask = torch.where(slots <= torch.arange(past, past + new)[:, None], 0.0, hides)[None, None]
    mask[..., max(past - 4, 0) : past] += bias
    return mask


@pytest.mark.parametrize("hides", [-1e4, float("-inf"), torch.finfo(torch.float32).min])
@torch.no_grad()
def test_what_hides_is_read_and_what_adds_is_refused(hides: float) -> None:
    model = tiny.llama()
    cache = DynamicCache()
    with saccade.sparsify(model, "quest:page=4,budget=8") as run:
        model(prompt(40), past_key_values=cache, attention_mask=causal(0, 40, hides, 0.5).clamp(max=0.5))
        model(prompt(1), past_key_values=cache, attention_mask=causal(40, 1, hides))
        assert run.stats().steps == 1
        for bias in (0.25, -2.0):
            with pytest.raises(saccade.UnsupportedModelError, match="adds to scores of tokens that it shows"):
                model(prompt(1), past_key_values=cache, attention_mask=causal(41, 1, hides, bias))
        assert cache.get_seq_length() == 41


OPERATIONS: dict[str, Any] = {
    "crop some": lambda cache: cache.crop(-3),
    "crop none": lambda cache: cache.crop(0),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([0])),
    "reset": lambda cache: cache.reset(),
}


@example(2, ["reset", 0, "crop some"])
@example(1, ["crop some", "repeat", "crop some", 0])
@given(st.integers(0, 4), st.lists(st.sampled_from([*OPERATIONS, 0, 1, 2, 3]), max_size=6))
def test_operations_on_layers_filled_in_part_do_what_stock_does(filled: int, operations: list[Any]) -> None:
    """Of four layers the first are filled, as a call leaves them that fills some; numbers append to that layer."""
    with saccade.sparsify(tiny.llama(), "quest:page=4,budget=8") as run, torch.no_grad():
        model = run.model
        cache, stock = DynamicCache(), DynamicCache()
        model(prompt(20), past_key_values=cache)
        cache.reset()
        for operation in (*range(filled), *operations):
            rows = next((one.keys.shape[0] for one in stock.layers if one.keys is not None and one.keys.dim() == 4), 1)
            new = torch.randn(2, rows, 2, 5, 16)
            # Stock has no layer without those before it, and fails to crop where one was reset and not filled again.
            reset = any(layer.keys is None for layer in stock.layers)
            if operation in range(len(stock.layers) + 1, 4) or (operation == "crop some" and reset):
                continue
            for one in (cache, stock):
                one.update(*new, operation) if isinstance(operation, int) else OPERATIONS[operation](one)
            for ours, its in zip(cache.layers, stock.layers, strict=False):
                assert (ours.get_seq_length(), ours.is_initialized) == (its.get_seq_length(), its.is_initialized)
                for got, want in ((ours.keys, its.keys), (ours.values, its.values)):
                    assert (got is None) == (want is None) and (got is None or torch.equal(got, want))
            assert not any(layer.is_initialized for layer in cache.layers[len(stock.layers) :])
        cache.reset()
        model(prompt(20, rows=3), past_key_values=cache)
        assert cache.get_seq_length() == 20


TEXTS = prompt(20), prompt(12, seed=2)


@torch.no_grad()
def uses(model: Any) -> list[list[list[int]]]:
    caches = [DynamicCache() for _ in range(5)]
    for cache, ids in zip(caches, (*TEXTS, TEXTS[0], TEXTS[0]), strict=False):
        model(ids, past_key_values=cache)
    first, second, repeated, expanded, again = caches
    for layer, other in zip(first.layers, second.layers, strict=True):  # transformers#35684: two caches, one behind
        layer.keys, layer.values = (torch.cat((getattr(layer, n), getattr(other, n)), 2) for n in ("keys", "values"))
    answers = [answered(model, torch.cat((*TEXTS, prompt(3)), dim=1), past_key_values=first)]
    repeated.batch_repeat_interleave(3)  # transformers#34232: a prefix over a batch
    for layer in expanded.layers:  # transformers#28738: the same by hand
        layer.keys, layer.values = layer.keys.expand(3, -1, -1, -1), layer.values.expand(3, -1, -1, -1)
    rows = torch.cat((TEXTS[0].expand(3, -1), LATER[:6].view(3, 2)), dim=1)
    answers += [answered(model, rows, past_key_values=cache) for cache in (repeated, expanded)]
    answered(model, past_key_values=again)
    again.crop(29 - again.get_seq_length())  # transformers#32019: the same prompt once more
    answers.append(answered(model, past_key_values=again))
    model.train()  # unsloth#2973, transformers#36051, turbo-alignment#47: what training leaves
    model.eval()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    return [*answers, answered(model, use_cache=True)]


def test_reported_uses_give_stocks_tokens() -> None:
    """From public trackers, which docs/transformers.md names; the others are ways, and adapters in test_lifecycle."""
    expected = uses(fresh())
    for policy in KINDS:
        with saccade.sparsify(fresh(), EXACT[policy]) as run:
            assert uses(run.model) == expected
