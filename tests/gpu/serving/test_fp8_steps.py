"""Captured decoding steps on a cache of 8-bit floats, which are as far from float32 as such a cache explains.

Factors are written once the graphs are captured, other ones in neighbouring layers: whoever reads them on the host, or
another layer's, is off by two at least.

What 8 bits make of keys and values also moves sets, so the error is no multiple of stock's. It is drawn instead, by
factors that round every number another way, in float32: an engine's own is one draw more, and lies below `limit_of`
these but once in a thousand. Queries that stock quantises and bfloat16 are errors of their own: what stock's distance
has beyond such a draw.
"""

from statistics import mean, stdev
from typing import Any

import pytest
import torch
from cuda_engines import DEVICE, CudaEngines, Request, Truth, core, distance, feed, say
from scipy.stats import t
from test_captured_steps import REQUESTS, kernels, replays
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache
from vllm import LLM
from vllm.config import CUDAGraphMode

import saccade

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
QUERY, KEYS, VALUES = 0.05, 0.07, 0.06
"""Factors of the first layer; queries, keys and values of this model are below 20, so that nothing is cut off."""
DRAWS = 8
BEYOND = 1e-3
"""How often a further draw may lie beyond the limit."""


def scale(engine: LLM) -> None:
    layers = core(engine).vllm_config.compilation_config.static_forward_context
    for number, layer in enumerate(layers.values()):
        for phase, (name, factor) in enumerate((("_q_scale", QUERY), ("_k_scale", KEYS), ("_v_scale", VALUES))):
            getattr(layer, name).fill_(factor * 2 ** ((number + phase) % 3))


class EightBitCache(DynamicCache):
    """Keeps what 8 bits make of keys and values, by another factor in every row."""

    def update(self, keys: Tensor, values: Tensor, layer: int, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        steps = 2 ** (torch.arange(len(keys), device=keys.device) / len(keys))
        held = []
        for numbers, factor in ((keys, KEYS), (values, VALUES)):
            factors = (factor * steps)[:, None, None, None]
            held.append((numbers / factors).to(torch.float8_e4m3fn).to(numbers.dtype) * factors)
        whole: tuple[Tensor, Tensor] = super().update(*held, layer, *rest, **more)
        return whole


@torch.inference_mode()
def drawn(truth: Truth, policy: str, request: Request) -> list[float]:
    """How far each draw is from float32."""
    exact = truth.logits(policy, request)
    model, ids = truth.models[torch.float32], torch.tensor([request.ids] * DRAWS, device=DEVICE)
    cache, reader = EightBitCache(config=model.config), AutoTokenizer.from_pretrained(truth.folder)
    with saccade.sparsify(model, policy if request.sparse else "dense", tokenizer=reader):
        pieces = [ids[:, : request.prompt], *ids[:, request.prompt : -1].split(1, dim=1)]
        rows = torch.stack([model(piece, past_key_values=cache).logits[:, -1] for piece in pieces], 1)
    return [distance(row, exact) for row in rows.float().cpu()]


def limit_of(draws: list[float]) -> float:
    """Below which one draw more lies."""
    wide = float(t.ppf(1 - BEYOND, len(draws) - 1)) * (1 + 1 / len(draws)) ** 0.5
    return mean(draws) + wide * stdev(draws)


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


@pytest.fixture(scope="module")
def dense_draws(truth: Truth) -> dict[str, list[float]]:
    """Distances of draws in which every layer attends to everything, by request."""
    return {one.name: drawn(truth, "dense", one) for one in REQUESTS}


@pytest.fixture(scope="module")
def own_errors(stock_distance: dict[str, float], dense_draws: dict[str, list[float]]) -> dict[str, float]:
    """The square of what stock's distance has beyond its cache's rounding, by request."""
    return {name: max(0.0, far**2 - mean(dense_draws[name]) ** 2) for name, far in stock_distance.items()}


def expect(policy: str, told: str, found: dict[str, torch.Tensor], truth: Truth, errors: dict[str, float]) -> None:
    for request in REQUESTS:
        far = distance(found[request.name], truth.logits(policy, request))
        allowed = (limit_of(drawn(truth, policy, request)) ** 2 + errors[request.name]) ** 0.5
        say(f"{policy} {told} {request.name}: {far:.4f} of {allowed:.4f}")
        assert far <= allowed


@pytest.mark.parametrize("policy", POLICIES)
def test_captured_logits_are_as_near_as_stock_s(
    policy: str, engines: CudaEngines, truth: Truth, own_errors: dict[str, float], monkeypatch: pytest.MonkeyPatch
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
    expect(policy, "captured", found, truth, own_errors)


@pytest.mark.parametrize(
    "settings", [{"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, {"enforce_eager": True}], ids=str
)
def test_other_modes_answer_alike(
    settings: dict[str, Any], engines: CudaEngines, truth: Truth, own_errors: dict[str, float]
) -> None:
    engine = engines.make(QUEST, **FP8, **settings)
    scale(engine)
    expect(QUEST, str(settings), feed(engine, REQUESTS), truth, own_errors)


def test_a_dense_policy_is_no_further_than_another_draw(
    engines: CudaEngines, truth: Truth, stock_distance: dict[str, float], dense_draws: dict[str, list[float]]
) -> None:
    """vLLM's own kernel in every layer, with queries that we quantise: the same numbers in the same kernels, but for
    the order in which a compiler rounds, which draws anew what 8 bits make of them."""
    engine = engines.make("dense", **FP8)
    scale(engine)
    found = feed(engine, REQUESTS)
    for request in REQUESTS:
        far = distance(found[request.name], truth.logits("dense", request))
        draws = dense_draws[request.name]
        allowed = stock_distance[request.name] * limit_of(draws) / mean(draws)
        say(f"dense {request.name}: {far:.4f} of {allowed:.4f}, stock's {stock_distance[request.name]:.4f}")
        assert far <= allowed


def test_a_budget_for_everything_is_no_further_than_another_draw(
    engines: CudaEngines, truth: Truth, stock_distance: dict[str, float], dense_draws: dict[str, list[float]]
) -> None:
    """Our kernels from the first layer on, over all tokens: keys and values lose digits, queries and weights do not.

    Ours has fewer errors than stock and no others, so that all requests together are further only as far as draws are.
    """
    engine = engines.make("quest:budget=4096,dense_layers=0", **FP8)
    scale(engine)
    found = feed(engine, REQUESTS)
    far = sum(distance(found[request.name], truth.logits("dense", request)) for request in REQUESTS)
    draws = [sum(one) for one in zip(*dense_draws.values(), strict=True)]
    allowed = sum(stock_distance.values()) * limit_of(draws) / mean(draws)
    say(f"everything: {far:.4f} of {allowed:.4f}, stock's {sum(stock_distance.values()):.4f}")
    assert far <= allowed


@pytest.mark.parametrize("held", ["fp8_e5m2", "int8_per_token_head"])
def test_other_formats_are_refused_by_name(held: str, engines: CudaEngines) -> None:
    with pytest.raises(Exception, match=f"kv_cache_dtype={held} is not valid under a policy: auto, .*fp8_e4m3"):
        engines.make(QUEST, kv_cache_dtype=held)
