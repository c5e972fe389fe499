"""Windows that end earlier again, and rectification beside them: what sparse steps left in any layer is rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

import saccade
from saccade.adapters.hf.window import RewindingWindow

from . import tiny
from .test_layer_kinds import HYBRIDS, NEW, WAYS, WINDOW, hybrid
from .ways import several_turns

EVERY = 3
WINDOWED = [name for name in HYBRIDS if name != "qwen3_next"]
SPECS = ("quest:page=4,budget=8,dense_layers=1", "less_is_more:reselect=4,dense_layers=1,budget=9")
ROUNDING = dict.fromkeys(WINDOWED, 2e5 * 2.0**-53)
ROUNDING |= dict.fromkeys(("llama4_text", "mimo_v2_flash"), 8 * 2.0**-24)
"""Some thousand sums of float64 numbers of order 1 and 10, in another order where shapes differ. Whatever the model's
dtype, Llama 4 normalises and turns queries and keys in float32, and MiMo routes to experts in it: a few roundings."""


@given(
    window=st.integers(2, 6),
    reach=st.integers(0, 4),
    early=st.integers(0, 9),
    calls=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 12)), min_size=1, max_size=8),
    unseen=st.booleans(),
)
def test_a_window_shows_what_stocks_would(
    window: int, reach: int, early: int, calls: list[tuple[int, int]], unseen: bool
) -> None:
    """After every call as many tokens are taken back as may be, at most to `reach` before where any call began."""
    stock = DynamicSlidingWindowLayer(window)
    fed = torch.randn(2, 3, early, 4)
    if early:
        stock.update(fed, -fed)
    layer, first = RewindingWindow.adopt(stock, reach), early
    for queries, back in calls:
        new = torch.randn(2, 3, queries, 4)
        mask = layer.get_mask_sizes(queries)
        keys, values = layer.update(new, -new)
        past, fed = fed.shape[2], torch.cat([fed, new], dim=2)
        assert torch.equal(keys, fed[:, :, max(past - window + 1, 0) :]) and torch.equal(values, -keys)
        assert mask == (keys.shape[2], max(past - window + 1, 0))
        first = max(first, past - reach)
        end = max(fed.shape[2] - back, first)
        layer.end_at(end)
        if unseen:
            layer.end_at(fed.shape[2])
            layer.crop(end - fed.shape[2])
        fed = fed[:, :, :end]
        assert layer.get_seq_length() == end
        assert torch.equal(layer.keys, fed[:, :, max(end - window + 1, 0) :]) and torch.equal(layer.values, -layer.keys)


def test_a_window_that_is_gone_is_refused() -> None:
    layer = RewindingWindow(4, reach=2)
    for _ in range(9):
        layer.update(torch.randn(1, 1, 1, 2), torch.randn(1, 1, 1, 2))
    layer.end_at(6)
    with pytest.raises(RuntimeError, match="the window before slot 5 is gone; from slot 3 on tokens are held"):
        layer.end_at(5)
    with pytest.raises(RuntimeError, match="the window before slot 10 is gone"):
        layer.end_at(10)


def test_recorded_tokens_are_held_until_a_crop() -> None:
    """As stock does for an assistant, which drafts tokens one by one and has several taken back."""
    layer, fed = RewindingWindow(4, reach=1), torch.randn(1, 1, 30, 2)
    layer.update(fed[:, :, :9], fed[:, :, :9])
    layer.activate_past_recording()
    for slot in range(9, 16):
        keys, _ = layer.update(fed[:, :, slot : slot + 1], fed[:, :, slot : slot + 1])
        assert torch.equal(keys, fed[:, :, slot - 3 : slot + 1])
    layer.crop(-6)
    assert layer.get_seq_length() == 10 and torch.equal(layer.keys, fed[:, :, 7:10])
    layer.end_at(9)
    assert torch.equal(layer.keys, fed[:, :, 6:9])
    with pytest.raises(RuntimeError, match="from slot 6 on tokens are held"):
        layer.end_at(8)


def test_cropping_more_than_there_is_leaves_nothing_as_in_stock() -> None:
    stock, layer, fed = DynamicSlidingWindowLayer(8), RewindingWindow(8, reach=2), torch.randn(1, 1, 5, 2)
    for one in (stock, layer):
        one.update(fed, fed)
        one.crop(-9)
    assert layer.get_seq_length() == stock.get_seq_length() == 0 and layer.keys.shape == stock.keys.shape
    assert layer.get_mask_sizes(3) == stock.get_mask_sizes(3)
    with pytest.raises(RuntimeError, match="the window before slot -1 is gone"):
        layer.end_at(-1)


def test_rows_that_move_behind_a_prompt_take_no_more_of_it_than_is_needed() -> None:
    layer, fed = RewindingWindow(4, reach=2), torch.randn(2, 1, 50, 2)
    layer.update(fed, fed)
    layer.reorder_cache(torch.tensor([1, 1]))
    assert max(part.shape[2] for part in layer._held) == 5
    layer.end_at(48)
    assert torch.equal(layer.keys, fed[[1, 1], :, 45:48])


def test_rows_of_a_window_move_with_what_it_hides() -> None:
    layer, fed = RewindingWindow(4, reach=2), torch.randn(3, 1, 9, 2)
    for slot in range(9):
        layer.update(fed[:, :, slot : slot + 1], fed[:, :, slot : slot + 1])
    layer.reorder_cache(torch.tensor([2, 0, 2]))
    layer.batch_repeat_interleave(2)
    layer.end_at(7)
    assert torch.equal(layer.keys, fed[[2, 2, 0, 0, 2, 2], :, 4:7])
    layer.batch_select_indices(torch.tensor([False, False, True, True, False, False]))
    layer.end_at(9)
    assert torch.equal(layer.values, fed[[0, 0], :, 6:9])
    layer.reset()
    layer.update(fed[:, :, :1], fed[:, :, :1])
    assert layer.get_seq_length() == 1 and torch.equal(layer.keys, fed[:, :, :1])


def test_what_was_put_in_by_hand_is_all_there_is() -> None:
    """As where a cache is set back to a copy of what it held."""
    layer, fed = RewindingWindow(4, reach=2), torch.randn(1, 1, 9, 2)
    layer.update(fed, fed)
    held = {name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(layer).items()}
    layer.update(fed, fed)
    vars(layer).update(held)
    keys, _ = layer.update(fed[:, :, :1], fed[:, :, :1])
    assert torch.equal(keys, torch.cat([fed[:, :, 6:], fed[:, :, :1]], dim=2)) and layer.get_seq_length() == 10


@contextmanager
def clean_slots_are_dense(run: saccade.Run, name: str) -> Iterator[list[int]]:
    """After every call all layers hold, in clean slots, what stock makes of the same tokens; yields their counts."""
    twin, checked = hybrid(name).double(), []

    def check(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        session, cache = run._hook.slot[0], kwargs.get("past_key_values")
        if cache is None:
            return
        length = int(cache.get_seq_length())
        clean = min(session.state.history.clean, length)
        ids, positions = session.state.history.ids(0, clean), session.state.history.positions(0, clean)
        assert ids is not None and positions is not None
        # In slots of padding the first position is repeated.
        visible = torch.cat([positions[:, 1:] > positions[:, :-1], torch.ones_like(positions[:, :1]) > 0], dim=1)
        everything = DynamicCache()
        with torch.no_grad():
            twin(ids, attention_mask=visible.long(), position_ids=positions, past_key_values=everything)
        for ours, theirs in zip(cache.layers, everything.layers, strict=True):
            first = length - ours.keys.shape[2]
            assert first == (max(length - WINDOW + 1, 0) if isinstance(ours, RewindingWindow) else 0)
            real = visible[:, None, first:, None]
            for held, wanted in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                difference = (held[:, :, : clean - first] - wanted[:, :, first:]).masked_fill(~real, 0.0)
                assert float(difference.abs().max()) <= ROUNDING[name] * float(wanted.abs().max())
        checked.append(clean)

    handle = run.model.model.register_forward_hook(check, with_kwargs=True)
    yield checked
    handle.remove()


REWRITTEN: dict[str, Callable[[PreTrainedModel], Any]] = {
    **{way: WAYS[way] for way in WAYS if way != "static cache"},
    "by hand": lambda model: tiny.by_hand(model, tiny.prompt(), NEW, DynamicCache(config=model.config)),
    "several turns": lambda model: several_turns(model, DynamicCache(config=model.config)),
}


@pytest.mark.parametrize("way", REWRITTEN)
@pytest.mark.parametrize("name", WINDOWED)
def test_what_is_rewritten_is_what_stock_would_hold(name: str, way: str) -> None:
    """In float64: a pass attends to clean slots only, and in float64 as stock does."""
    model = hybrid(name).double()
    for spec in SPECS:
        with (
            saccade.sparsify(model, f"{spec},rectify={EVERY}") as run,
            clean_slots_are_dense(run, name) as checked,
        ):
            REWRITTEN[way](model)
            done = run.stats()
        assert done.dense_passes >= 1 and done.rectifications >= done.dense_passes
        assert max(checked) > 30


@pytest.mark.parametrize("way", REWRITTEN)
@pytest.mark.parametrize("name", WINDOWED)
def test_verification_gives_stocks_tokens(name: str, way: str) -> None:
    model = hybrid(name).double()
    if way in ("beams", "prompt lookup"):
        with (
            saccade.sparsify(model, f"{SPECS[0]},rectify={EVERY}:verify"),
            pytest.raises(saccade.UnsupportedModelError, match="rectify mode verify"),
        ):
            REWRITTEN[way](model)
        return
    stock = REWRITTEN[way](model)
    for spec in SPECS:
        with saccade.sparsify(model, f"{spec},rectify={EVERY}:verify") as run:
            found = REWRITTEN[way](model)
            assert run.stats().drafted > 0
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(stock))


@pytest.mark.parametrize("layer", [0, 3, 4])
@torch.no_grad()
def test_an_interrupted_pass_is_made_up_for(layer: int) -> None:
    """Whichever layers it has reached."""
    model, tokens = hybrid("gemma3_text").double(), tiny.prompt(9, seed=3)

    def decode(interrupted: bool) -> Tensor:
        with saccade.sparsify(model, f"{SPECS[0]},rectify={EVERY}") as run:
            cache = DynamicCache(config=model.config)
            model(tiny.prompt(), past_key_values=cache)
            logits = []
            for number, token in enumerate(tokens[0]):
                if interrupted and number == EVERY:
                    hook = model.model.layers[layer].register_forward_pre_hook(_raise)
                    with pytest.raises(KeyboardInterrupt):
                        model(token[None, None], past_key_values=cache)
                    hook.remove()
                logits.append(model(token[None, None], past_key_values=cache).logits)
            assert cache.get_seq_length() == 39 and run.stats().dense_passes == 2
            return torch.cat(logits, dim=1)

    torch.testing.assert_close(decode(True), decode(False), rtol=0, atol=1e-4)


def _raise(module: Any, args: Any) -> None:
    raise KeyboardInterrupt


def test_other_caches_are_refused() -> None:
    model = hybrid("gemma3_text")
    caches = {
        "DynamicLayer": DynamicCache(),
        "StaticSlidingWindowLayer": StaticCache(config=model.config, max_cache_len=64),
    }
    with saccade.sparsify(model, f"{SPECS[0]},rectify={EVERY}"), torch.no_grad():
        for told, cache in caches.items():
            with pytest.raises(saccade.UnsupportedModelError, match=f"{told} does not .* DynamicCache.config="):
                model(tiny.prompt(), past_key_values=cache)


@pytest.mark.parametrize("suffix", [f",rectify={EVERY}", f",rectify={EVERY}:verify"])
def test_windows_above_all_full_layers_are_seen(suffix: str) -> None:
    """As in Qwen 2: a cache that grows layer by layer does not have them when a plan is installed."""
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **windows)).double().eval()
    assert model.config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    tokens = tiny.prompt().remainder(64)
    with saccade.sparsify(model, f"quest:page=4,budget=8{suffix}"), torch.no_grad():
        with pytest.raises(saccade.UnsupportedModelError, match=r"DynamicLayer does not .* DynamicCache.config="):
            model(tokens, past_key_values=DynamicCache())
        held = DynamicCache(config=model.config)
        model.generate(tokens, past_key_values=held, do_sample=False, max_new_tokens=9, eos_token_id=None)
    assert [type(layer).__name__ for layer in held.layers] == ["GrowingLayer"] * 2 + ["RewindingWindow"] * 2


@pytest.mark.parametrize("every", [1, 2])
def test_a_rectified_assistant_drafts_more_than_a_pass_takes_back(every: int) -> None:
    model, assistant = hybrid("gemma3_text"), hybrid("gemma3_text")
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    drafts = {"num_assistant_tokens": 9, "num_assistant_tokens_schedule": "constant"}
    assistant.generation_config.update(**drafts, assistant_confidence_threshold=0.0)
    alone = model.generate(tiny.prompt(), do_sample=False, max_new_tokens=NEW)
    with saccade.sparsify(assistant, f"{SPECS[0]},rectify={every}") as run:
        found = model.generate(tiny.prompt(), assistant_model=assistant, do_sample=False, max_new_tokens=NEW)
        assert run.stats().dense_passes > 0
    assert torch.equal(found, alone)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@torch.no_grad()
def test_what_stock_decoded_between_two_runs_is_not_run_again(name: str) -> None:
    """Nobody knows its tokens; the second run rectifies what it writes itself."""
    model = tiny.fresh(name).double() if name == "llama" else hybrid(name).double()
    spec, cache = f"{SPECS[0]},rectify={EVERY}", DynamicCache(config=model.config)

    def decode(count: int) -> None:
        for token in range(count):
            model(torch.tensor([[5 + token]]), past_key_values=cache)

    with saccade.sparsify(model, spec):
        model(tiny.prompt(), past_key_values=cache)
        decode(2)
    decode(10)
    found = cache.get_seq_length()
    with saccade.sparsify(model, spec) as run:
        decode(1)
        assert run._hook.slot[0].state.history.clean == found
        decode(2 * (EVERY + 1))
        done = run.stats()
    assert done.dense_passes == 2 and done.rectifications == 2 * EVERY


def test_masks_by_kind_are_refused_where_tokens_run_again() -> None:
    model = hybrid("gemma3_text")
    with saccade.sparsify(model, f"{SPECS[0]},rectify={EVERY}"), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(tiny.prompt(), past_key_values=cache)
        masks = {"full_attention": None, "sliding_attention": None}
        with pytest.raises(saccade.UnsupportedModelError, match="masks for full_attention, sliding_attention"):
            model(torch.tensor([[5]]), past_key_values=cache, attention_mask=masks)


def test_a_run_that_rewrites_nothing_leaves_windows_to_stock() -> None:
    """And one that does may follow it on the same cache, or come before it."""
    model, cache = hybrid("gemma3_text"), DynamicCache(config=hybrid("gemma3_text").config)
    for suffix, kind in (("", DynamicSlidingWindowLayer), (",rectify=3", RewindingWindow), ("", RewindingWindow)):
        with saccade.sparsify(model, SPECS[0] + suffix), torch.no_grad():
            for _ in range(5):
                model(tiny.prompt(5, seed=cache.get_seq_length()), past_key_values=cache)
        assert type(cache.layers[0]) is kind
        assert cache.layers[0].keys.shape[2] == WINDOW - 1
