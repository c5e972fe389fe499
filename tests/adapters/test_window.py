"""Windows that end earlier again, and rectification beside them: what sparse steps left in any layer is rewritten."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

import saccade
from saccade.adapters.hf.window import RewindingWindow
from saccade.eval.snapshot import Snapshot

from . import tiny
from .rectified import ROUNDING, clean_slots_are_dense, exact_twin
from .test_layer_kinds import FULL_LAYERS, HYBRIDS, NEW, STOCK, WAYS, WINDOW, greedy, hybrid
from .ways import VERSION, needs_5, paired, several_turns

EVERY = 3
FORGETS = needs_5("rectification takes tokens back, of which a DynamicLayer does not know")
"""Of drafts: to caches that they are taken from, stock of transformers 4 gives no windows."""
WINDOWED = [name for name in HYBRIDS if name != "qwen3_next"]
SPECS = ("quest:page=4,budget=8,dense_layers=1", "less_is_more:reselect=4,dense_layers=1,budget=9")
COARSE = {"llama4_text", *STOCK} - {"gpt_oss"}
"""Whatever the model's dtype, Llama 4 normalises and turns queries and keys in float32, MiMo routes to experts in it,
and Gemma 2's eager function weighs in it: a few roundings."""


def mask_sizes(layer: RewindingWindow, queries: int) -> tuple[int, int]:
    """Keys that the next `queries` tokens are shown, and the first one's slot; transformers 4 asks by their slots."""
    return layer.get_mask_sizes(queries if VERSION >= (5,) else torch.arange(queries))


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
    """After every call as many tokens as may be are taken back: `reach`, and behind others that were, all of it."""
    stock = DynamicSlidingWindowLayer(window)
    fed = torch.randn(2, 3, early, 4)
    if early:
        stock.update(fed, -fed)
    layer, first, rewound = RewindingWindow.adopt(stock, reach), early, False
    for queries, back in calls:
        new = torch.randn(2, 3, queries, 4)
        mask = mask_sizes(layer, queries)
        keys, values = layer.update(new, -new)
        past, fed = fed.shape[2], torch.cat([fed, new], dim=2)
        assert torch.equal(keys, fed[:, :, max(past - window + 1, 0) :]) and torch.equal(values, -keys)
        assert mask == (keys.shape[2], max(past - window + 1, 0))
        first = max(first, (past if rewound else fed.shape[2]) - reach)
        end = max(fed.shape[2] - back, first)
        layer.end_at(end)
        rewound = end < fed.shape[2] and not unseen
        if unseen:
            layer.end_at(fed.shape[2])
            layer.crop(end - fed.shape[2])
            first = max(first, end - reach)
        fed = fed[:, :, :end]
        assert layer.get_seq_length() == end
        assert torch.equal(layer.keys, fed[:, :, max(end - window + 1, 0) :]) and torch.equal(layer.values, -layer.keys)


@pytest.mark.skipif(VERSION < (5,), reason="no layer of transformers 4 records its past")
@given(
    window=st.integers(2, 6),
    reach=st.integers(0, 4),
    prompt=st.integers(1, 9),
    calls=st.lists(st.tuples(st.lists(st.integers(1, 3), max_size=6), st.integers(0, 9)), min_size=1, max_size=5),
)
def test_a_recorded_past_is_held_until_crop(
    window: int, reach: int, prompt: int, calls: list[tuple[list[int], int]]
) -> None:
    """As an assistant's cache is used: several calls, then at most as many tokens are taken back as they brought."""
    ours, stock = RewindingWindow(window, reach), DynamicSlidingWindowLayer(window)
    fed = torch.randn(1, 2, prompt, 4)
    for layer in (ours, stock):
        layer.update(fed, -fed)
        layer.activate_past_recording()
    for parts, back in calls:
        for queries in parts:
            new = torch.randn(1, 2, queries, 4)
            (keys, values), theirs = ours.update(new, -new), stock.update(new, -new)
            assert torch.equal(keys, theirs[0]) and torch.equal(values, theirs[1])
        for layer in (ours, stock):
            layer.crop(-min(back, sum(parts)))
        assert ours.get_seq_length() == stock.get_seq_length()
        assert torch.equal(ours.keys, stock.keys) and torch.equal(ours.values, stock.values)
    earliest = max(ours.get_seq_length() - reach, 0)
    if earliest >= window:
        with pytest.raises(RuntimeError, match=f"before slot {earliest - 1} is gone"):
            ours.end_at(earliest - 1)
    ours.end_at(earliest)


def test_more_taken_back_than_there_is_leaves_nothing() -> None:
    layer, fed = RewindingWindow(8, reach=3), torch.randn(1, 1, 5, 2)
    layer.crop(-1)
    layer.update(fed, fed)
    for nowhere in (-4, 6):
        with pytest.raises(RuntimeError, match=f"the window before slot {nowhere} is gone; from slot 0 on tokens are"):
            layer.end_at(nowhere)
    layer.crop(4)
    assert layer.get_seq_length() == 4, "above 0: what is kept"
    layer.crop(-9)
    assert layer.get_seq_length() == 0 and mask_sizes(layer, 2) == (2, 0)
    keys, _ = layer.update(fed, fed)
    assert torch.equal(keys, fed) and layer.get_seq_length() == 5
    assert RewindingWindow.adopt(layer, 6).reach == 6


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


REWRITTEN: dict[str, Callable[[PreTrainedModel], Any]] = {
    **{way: WAYS[way] for way in WAYS if way != "static cache"},
    "by hand": lambda model: tiny.by_hand(model, tiny.prompt(), NEW, DynamicCache(config=model.config)),
    "several turns": lambda model: several_turns(model, DynamicCache(config=model.config)),
}
if VERSION < (5,):
    # Stock counts padding there where it reads a prompt in chunks.
    REWRITTEN["chunked prompt"] = lambda model: greedy(model, **tiny.padded([30, 30]), prefill_chunk_size=7)

# One model in all ways, and all models by hand; with one policy after the other.
HELD = [(name, way) for name in WINDOWED for way in REWRITTEN if name == "gemma3_text" or way == "by hand"]
HELD_UNDER = [(name, way, SPECS[place % 2]) for place, (name, way) in enumerate(HELD)]


@pytest.mark.parametrize(("name", "way", "spec"), HELD_UNDER)
def test_what_is_rewritten_is_what_stock_would_hold(
    name: str, way: str, spec: str, request: pytest.FixtureRequest
) -> None:
    """In float64: a pass attends to clean slots only, and in float64 as stock does."""
    if way == "prompt lookup":
        request.applymarker(FORGETS)
    model, exact = hybrid(name).double(), exact_twin(hybrid, name)
    rounding = 8 * 2.0**-24 if name in COARSE else ROUNDING
    with (
        saccade.sparsify(model, f"{spec},rectify={EVERY}") as run,
        clean_slots_are_dense(run, exact, rounding, WINDOW) as checked,
    ):
        REWRITTEN[way](model)
        done = run.stats()
    assert done.dense_passes >= 1 and done.rectifications >= done.dense_passes
    assert max(checked) > 30


@pytest.mark.parametrize(("name", "way"), paired(WINDOWED, REWRITTEN))
def test_verification_gives_stocks_tokens(name: str, way: str) -> None:
    model = hybrid(name).double()
    if way in ("beams", "prompt lookup"):
        with (
            saccade.sparsify(model, f"{SPECS[0]},rectify={EVERY}:verify"),
            pytest.raises(saccade.UnsupportedModelError, match="rectify mode verify"),
        ):
            REWRITTEN[way](model)
        return
    stock, spec = REWRITTEN[way](model), SPECS[WINDOWED.index(name) % 2]
    with saccade.sparsify(model, f"{spec},rectify={EVERY}:verify") as run:
        found = REWRITTEN[way](model)
        assert run.stats().drafted > 0
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(stock))


@FORGETS
@pytest.mark.parametrize("rectify", ["1", "2", "1:verify"])
def test_an_assistant_is_rectified_too(rectify: str) -> None:
    """It drafts more tokens than are run again at once, and stock takes back those that the target does not confirm."""
    target, assistant = hybrid("gemma3_text").double(), hybrid("gemma3_text").double()
    drafting = assistant.generation_config
    drafting.num_assistant_tokens, drafting.num_assistant_tokens_schedule = 9, "constant"
    drafting.assistant_confidence_threshold = 0.0
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype), alpha=0.05)
    asked: Any = {"do_sample": False, "max_new_tokens": 12}
    alone = target.generate(tiny.prompt(), **asked)
    with saccade.sparsify(assistant, f"{SPECS[0]},rectify={rectify}") as run:
        together = target.generate(tiny.prompt(), assistant_model=assistant, **asked)
        assert run.stats().dense_passes > 1
    assert together.tolist() == alone.tolist()


def test_a_prompt_leaves_no_more_than_the_window_and_what_is_taken_back() -> None:
    """What rows that move, and copies, would take along."""
    model, copied = hybrid("gemma3_text"), []
    with saccade.sparsify(model, f"{SPECS[0]},rectify={EVERY}"), torch.no_grad():
        for length in (30, 200):
            cache = DynamicCache(config=model.config)
            model(tiny.prompt(length), past_key_values=cache)
            held = tree_leaves(Snapshot.of(cache, FULL_LAYERS).held)
            copied.append(sum(part.nbytes for part in held if isinstance(part, Tensor)))
    assert copied[0] == copied[1]


UNSEEN: dict[str, tuple[str, int, int]] = {
    "decoded on": ("8", 0, 10),
    "one token more": ("8", 0, 1),
    "others in their place": ("8", 3, 3),
    "others than were drafted": ("8:verify", 0, 3),
}
"""How the first run is rectified, how many of its tokens are taken back, and how many stock then decodes."""


@pytest.mark.parametrize(("unseen", "name"), paired(UNSEEN, ["llama", "gemma3_text"]))
def test_what_stock_decoded_between_two_runs_stays(name: str, unseen: str) -> None:
    """Nobody knows those tokens, so nothing up to them is run again; what the second run decodes is."""
    model = tiny.fresh("llama") if name == "llama" else hybrid(name)
    rectify, back, more = UNSEEN[unseen]
    cache = DynamicCache(config=model.config)

    def decode(count: int, first: int) -> None:
        for token in range(first, first + count):
            model(torch.tensor([[token]]), past_key_values=cache)

    with torch.no_grad():
        with saccade.sparsify(model, f"{SPECS[0]},rectify={rectify}"):
            model(tiny.prompt(), past_key_values=cache)
            decode(7, first=5)
        if back:
            cache.crop(-back)
        decode(more, first=40)
        length = cache.get_seq_length()
        found = [cache.layers[layer].keys.clone() for layer in (1, 2)]
        with saccade.sparsify(model, f"{SPECS[0]},rectify=8") as run:
            decode(9, first=20)
            assert run.stats().rectifications == 8
        for layer, keys in zip((1, 2), found, strict=True):
            assert torch.equal(cache.layers[layer].keys[:, :, :length], keys)


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_windows_above_all_full_attention_are_known_too(name: str) -> None:
    """A cache that grows layer by layer does not hold them when its first call begins."""
    if name == "qwen2":
        model = tiny.fresh(name, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)
    else:
        model = hybrid(name, layer_types=["full_attention"] * 3 + ["sliding_attention"] * 3)
    for mode in ("", ":verify"):
        with saccade.sparsify(model, f"{SPECS[0]},rectify={EVERY}{mode}") as run, torch.no_grad():
            with pytest.raises(saccade.UnsupportedModelError, match="DynamicLayer does not know"):
                model(tiny.prompt(), past_key_values=DynamicCache())
            tiny.by_hand(model, tiny.prompt(), NEW, DynamicCache(config=model.config))
            assert run.stats().dense_passes > 0


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
