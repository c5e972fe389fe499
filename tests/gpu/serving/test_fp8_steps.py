"""Captured decoding steps on a cache of 8-bit floats: about as near to float32 as stock vLLM with such a cache.

Factors are written once the graphs are captured, other ones in neighbouring layers: whoever reads them on the host, or
another layer's, is off by two at least. A set moves by what 8 bits make of keys, the more the fewer heads see all: on a
CPU logits of these policies were up to 1.8 times as far off as stock's, and with factors that are off by two 2.8 to
10 times. So 2.5 is allowed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_engines import CudaEngines, Truth, core, distance, feed, say
from test_captured_steps import REQUESTS, kernels, replays
from vllm import LLM
from vllm.config import CUDAGraphMode

# FlashAttention 3 answers over such a cache in bfloat16 alone.
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}
QUEST = "quest:budget=256"
POLICIES = [
    QUEST,
    "tidal:budget=256,reselect=7",
    "less_is_more:budget=256,reselect=7",
    "resa:min_pages=4,ratio=0.1,rectify=none",
    "lychee_decode:budget=256,roles=every:4",
    "streaming:budget=256",
]


def scale(engine: LLM) -> None:
    """Queries, keys and values of this model are below 20: nothing is cut off."""
    layers = core(engine).vllm_config.compilation_config.static_forward_context
    for number, layer in enumerate(layers.values()):
        for phase, (name, factor) in enumerate((("_q_scale", 0.05), ("_k_scale", 0.07), ("_v_scale", 0.06))):
            getattr(layer, name).fill_(factor * 2 ** ((number + phase) % 3))


def attention_of(engine: LLM) -> set[str]:
    layers = core(engine).vllm_config.compilation_config.static_forward_context
    return {layer.attn_backend.get_name() for layer in layers.values()}


@pytest.fixture(scope="module")
def stock_distance(truth: Truth) -> dict[str, float]:
    """How far stock vLLM on such a cache is from float32, by request."""
    engines = CudaEngines()
    engine = engines.make(None, **FP8)
    assert attention_of(engine) == {"FLASH_ATTN"}
    scale(engine)
    found = feed(engine, REQUESTS)
    engines.close()
    return {one.name: distance(found[one.name], truth.logits("dense", one)) for one in REQUESTS}


def expect(policy: str, told: str, found: dict[str, torch.Tensor], truth: Truth, stock: dict[str, float]) -> None:
    for request in REQUESTS:
        exact = truth.logits(policy, request)
        far = distance(found[request.name], exact)
        allowed = 2.5 * max(stock[request.name], distance(truth.logits(policy, request, torch.bfloat16), exact))
        say(f"{policy} {told} {request.name}: {far:.4f} of {allowed:.4f}")
        assert far <= allowed


@pytest.mark.parametrize("policy", POLICIES)
def test_captured_logits_are_as_near_as_stock_s(
    policy: str,
    engines: CudaEngines,
    truth: Truth,
    stock_distance: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In full graphs of eight, four, two and one row; no kernel is compiled once the engine has started."""
    engine = engines.make(policy, **FP8)
    assert core(engine).vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
    scale(engine)
    seen, before = replays(engine, monkeypatch), kernels()
    found = feed(engine, REQUESTS)
    assert {8, 4, 2, 1} <= set(seen)
    assert sum(before.values()) > 0
    assert kernels() == before, "a kernel was compiled after the start"
    expect(policy, "captured", found, truth, stock_distance)


@pytest.mark.parametrize(
    "settings", [{"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, {"enforce_eager": True}], ids=str
)
def test_other_modes_answer_alike(
    settings: dict[str, Any], engines: CudaEngines, truth: Truth, stock_distance: dict[str, float]
) -> None:
    engine = engines.make(QUEST, **FP8, **settings)
    scale(engine)
    expect(QUEST, str(settings), feed(engine, REQUESTS), truth, stock_distance)


def test_a_dense_policy_is_no_further_than_stock(
    engines: CudaEngines, truth: Truth, stock_distance: dict[str, float]
) -> None:
    """vLLM's own kernel in every layer, with queries that we quantise: the same numbers in the same kernels, but for
    the order in which a compiler rounds."""
    engine = engines.make("dense", **FP8)
    scale(engine)
    found = feed(engine, REQUESTS)
    for request in REQUESTS:
        far = distance(found[request.name], truth.logits("dense", request))
        say(f"dense {request.name}: {far:.4f} of stock's {stock_distance[request.name]:.4f}")
        assert far <= 1.25 * stock_distance[request.name]


def test_a_budget_for_everything_is_nearer_than_stock(
    engines: CudaEngines, truth: Truth, stock_distance: dict[str, float]
) -> None:
    """Our kernels from the first layer on, over all tokens: keys and values lose digits, queries and weights do not.

    Prompts are vLLM's own in both, so that half of the answer's error is shared: ours is not the larger one.
    """
    engine = engines.make("quest:budget=4096,dense_layers=0", **FP8)
    scale(engine)
    found = feed(engine, REQUESTS)
    total = {"ours": 0.0, "stock": 0.0}
    for request in REQUESTS:
        far = distance(found[request.name], truth.logits("dense", request))
        say(f"everything {request.name}: {far:.4f}, stock {stock_distance[request.name]:.4f}")
        total["ours"] += far
        total["stock"] += stock_distance[request.name]
    assert total["ours"] <= 1.1 * total["stock"]


@pytest.mark.parametrize("held", ["fp8_e5m2", "int8_per_token_head"])
def test_other_formats_are_refused_by_name(held: str, engines: CudaEngines) -> None:
    with pytest.raises(Exception, match=f"kv_cache_dtype={held} is not valid under a policy: auto, .*fp8_e4m3"):
        engines.make(QUEST, kv_cache_dtype=held)
