"""Layers that keep no keys and values: they choose for themselves, from what another layer keeps and its one index."""

import functools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import saccade
from saccade.checkpoints.shape import shape_of
from saccade.decode.pages import PageIndexes
from saccade.plans.cost import cost_of

from . import tiny
from .checking import OracleObserver
from .test_layer_kinds import hybrid, known
from .tiny import CLUSTERS, LETTERS
from .ways import NEW, WAYS, needs_5, offered, paired

BUDGET = 9
REFUSED_ON_4 = needs_5("saccade cannot run Gemma3nForCausalLM: found 0 plain attention layers")
KNOWN = pytest.mark.skipif(not known("gemma4_text"), reason="this transformers has no Gemma 4")
SOURCES = {3: 0, 4: 2, 5: 2}
KEEPING = [0, 1, 2]
MANY = offered("greedy", "beams", "left-padded", "left-padded beams", "chunked prefill", "prompt lookup")
MANY += offered("static cache, beams", "several turns", "new turn alone", "by hand, left-padded")
AGREEING = offered("chunked prefill", "prompt lookup", "static cache", "by hand", "by hand, static")


@functools.cache
def gemma() -> PreTrainedModel:
    """Six layers, all of which a policy concerns: no window hides anything. Sources still go by the layers' types."""
    return hybrid("gemma3n_text", sliding_window=256)


@KNOWN
def test_a_source_is_the_last_of_its_type_below() -> None:
    shape = shape_of(gemma().config)
    assert (shape.sources, shape.kinds, shape.keeping) == (SOURCES, (), (0, 1, 2))
    assert shape.token_bytes(2) == 2 * 3 * 2 * 8 * 2
    windows = shape_of(hybrid("gemma4_text, shared").config)
    assert (windows.sources, windows.full_layers, windows.keeping) == (SOURCES, (1, 2, 4, 5), (1, 2))


def test_what_is_shared_is_read_by_all_and_written_once() -> None:
    """Two of four layers with full attention write, and one of two with windows."""
    shape = shape_of(hybrid("gemma3n_text").config)
    plan = saccade.policy("quest:page=4,budget=16,dense_layers=2").plan(shape)
    sizes: Any = {"context": 99, "batch": 1, "kv_itemsize": 2, "weight_bytes": 0}
    dense, sparse = (cost_of(one, None, shape, **sizes) for one in (saccade.policy("dense").plan(shape), plan))
    token = 2 * 2 * 8 * 2
    assert (dense.kv.read, dense.kv.written) == ((4 * 100 + 2 * 8) * token, (2 + 1) * token)
    assert (sparse.kv.read, sparse.kv.written) == ((2 * 100 + 2 * 16 + 2 * 8) * token, 3 * token)
    # Layers 4 and 5 choose by the bounds of layer 2 alone: a page's keys are read, both bounds written.
    assert sparse.index.written == 2 * 2 * 8 * 2


@REFUSED_ON_4
@pytest.mark.parametrize(("policy", "way"), paired(tiny.SPARSE, MANY))
def test_sets_are_the_oracles(policy: str, way: str) -> None:
    """Of the layer's own queries and the other layer's keys; layer 3, which publishes, keeps none."""
    spec, model = tiny.spec(policy, BUDGET), gemma()
    checker = OracleObserver(spec)
    with saccade.sparsify(model, spec, observers=(checker,)) as run:
        WAYS[way](model)
        assert run.stats().steps >= NEW - 1
    assert {layer for layer, _ in checker.seen} == set(range(6))


@functools.cache
def greedy(spec: str) -> list[list[int]]:
    with saccade.sparsify(gemma(), spec, tokenizer=LETTERS) as run:
        said: list[list[int]] = WAYS["greedy"](gemma()).tolist()
        assert run.stats().share_attended < 0.9
    return said


@REFUSED_ON_4
@pytest.mark.parametrize(("way", "spec"), paired(AGREEING, [tiny.spec("quest", BUDGET), CLUSTERS]))
def test_ways_agree(spec: str, way: str) -> None:
    """Several tokens of a call bring an index to the last of them before the layer that shares it sees the first."""
    expected = greedy(spec)
    with saccade.sparsify(gemma(), spec, tokenizer=LETTERS):
        assert WAYS[way](gemma()).tolist() == expected


@REFUSED_ON_4
@pytest.mark.parametrize(
    ("spec", "indexed"),
    [
        ("quest:page=4,budget=8,dense_layers=0", [0, 1, 2]),
        ("quest:page=4,budget=8,dense_layers=3", [0, 2]),
        ("quest:page=4,budget=8,dense_layers=4", [2]),
        (CLUSTERS.replace("dense_layers=1", "dense_layers=4"), [2]),
        ("tidal:reselect=3,dense_layers=1,budget=9", []),
    ],
)
def test_an_index_is_built_once_for_all_that_read_the_keys(spec: str, indexed: list[int]) -> None:
    model = gemma()
    with saccade.sparsify(model, spec):
        cache = DynamicCache()
        tiny.by_hand(model, tiny.prompt(), 9, cache)
        held = cache.layers[0].session.state.indexes
        told = held._covered if isinstance(held, PageIndexes) else {one for (one,) in held._looked[0].known}
        assert sorted(told) == indexed


@REFUSED_ON_4
@pytest.mark.parametrize("given", [True, False])
@torch.no_grad()
def test_layers_that_share_are_left_out_of_the_cache(given: bool) -> None:
    """As stock does; also where a cache without a configuration grows with what it is given."""
    model, ids = gemma(), tiny.prompt(30)
    stock = DynamicCache(config=model.config) if given else DynamicCache()
    ours = DynamicCache(config=model.config) if given else DynamicCache()
    model(ids, past_key_values=stock)
    with saccade.sparsify(model, tiny.spec("quest", BUDGET)):
        model(ids, past_key_values=ours)
        assert len(ours.layers) == len(stock.layers)
        assert [layer for layer, held in enumerate(ours.layers) if held.keys is not None] == KEEPING
        pairs = zip(ours.layers[:3], stock.layers[:3], strict=True)
        assert all(torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values) for one, other in pairs)


@KNOWN
def test_another_way_of_sharing_is_refused() -> None:
    """What a configuration says must be what the layers do."""
    model = hybrid("gemma3n_text")
    model.model.layers[2].self_attn.is_kv_shared_layer = True
    with pytest.raises(saccade.UnsupportedModelError, match=r"its layers \[2, 4, 5\] share a KV cache, which its"):
        saccade.sparsify(model, "dense")
    nothing = hybrid("gemma4_text, shared", num_kv_shared_layers=6)
    with pytest.raises(saccade.UnsupportedModelError, match="num_kv_shared_layers=6: no layer below keeps what"):
        saccade.sparsify(nothing, "dense")


@KNOWN
@pytest.mark.parametrize("kept", [0, 1, 3])
@torch.no_grad()
def test_layers_that_leave_positions_out_are_asked_for_those_that_are_wanted(kept: int) -> None:
    """Those of Gemma 4 that share run for these alone (transformers 5.24), where stock has a mask for that."""
    model, ids, fed = hybrid("gemma4_text, shared"), tiny.prompt(30), torch.arange(5, 9)[None]
    spec = "streaming:budget=9,sinks=4"
    stock = model(ids, logits_to_keep=kept).logits
    close: Any = {"rtol": 0, "atol": float(stock.abs().max()) * 200 * 2.0**-23}
    with saccade.sparsify(model, spec) as run:
        torch.testing.assert_close(model(ids, use_cache=False, logits_to_keep=kept).logits, stock, **close)
        cache, single = DynamicCache(config=model.config), DynamicCache(config=model.config)
        torch.testing.assert_close(model(ids, past_key_values=cache, logits_to_keep=kept).logits, stock, **close)
        model(ids, past_key_values=single)
        with run.decoding():
            together = model(fed, past_key_values=cache, logits_to_keep=kept).logits
            alone = torch.cat([model(token[None], past_key_values=single).logits for token in fed.T], dim=1)
        assert {layer.steps for layer in run.stats().layers if layer.steps} == {8}
    torch.testing.assert_close(together, alone[:, -kept:], **close)
