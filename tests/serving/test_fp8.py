"""Engines on a CPU whose cache holds 8-bit floats: what stock vLLM with such a cache decodes, and bounds that bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Answer, Engines, answers, core, eight_bits, force_own_path, greedy, prompt_of, prompts, runner
from vllm.platforms import current_platform

from saccade.adapters.vllm import checks
from saccade.adapters.vllm.worker.page_bounds import BlockBounds
from saccade.types import Rows
from walking import among

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
COVERING = ("quest:budget=512", "less_is_more:budget=512,reselect=7", "streaming:budget=512")
LENGTHS = (150, 90, 33)
NEW = 12


def scale(engine: Any) -> None:
    """Factors that no checkpoint gave, other ones in every layer; vLLM's CPU kernels read them on the host."""
    for number, layer in enumerate(layers_of(engine)):
        for side, factor in (("k", 0.03 * (1 + number / 12)), ("v", 0.01 * (1 + number / 6))):
            getattr(layer, f"_{side}_scale").fill_(factor)
            setattr(layer, f"_{side}_scale_float", float(getattr(layer, f"_{side}_scale")))


def layers_of(engine: Any) -> list[Any]:
    return list(runner(engine).compilation_config.static_forward_context.values())


def coarse(engine: Any) -> tuple[list[Answer], list[Answer]]:
    """Answers from a cache in 8 bits, or stock would agree with us for another reason; first it has no factors."""
    assert {layer.kv_cache.element_size() for layer in layers_of(engine)} == {1}
    plain = answers(engine, prompts(*LENGTHS), greedy(NEW))
    scale(engine)
    return plain, answers(engine, prompts(*LENGTHS), greedy(NEW))


@eight_bits
@pytest.mark.parametrize("policy", among(COVERING, COVERING[:2]))
def test_a_budget_that_covers_all_decodes_what_stock_does(
    policy: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through our operations, without factors and with them: the same keys and values in the same 8 bits.

    Only the order of sums differs. Where that moves a new number over a step of 8 bits, log-probabilities move by
    0.001; a factor that is 8% off, as the next layer's is, moves them by 0.04 and more in every answer.
    """
    expected = engines.by_stock(coarse, **FP8)
    force_own_path(monkeypatch)
    for found, stock in zip(coarse(engines.sparse(policy, **FP8)), expected, strict=True):
        for one, other in zip(found, stock, strict=True):
            assert one.tokens == other.tokens
            far = max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
            assert far < 5e-3


@eight_bits
def test_bounds_bound_what_the_cache_stands_for(engines: Engines) -> None:
    """In the engine's own pages, of every layer that selects, for every full page that a prompt filled."""
    engine = engines.sparse("quest:budget=64,page=16", **FP8)
    scale(engine)
    (prompt,) = prompts(150)
    engine.llm_engine.add_request("one", prompt_of(prompt), greedy(8))
    for _ in range(3):
        engine.llm_engine.step()
    (request,) = core(engine).scheduler.requests.values()
    (blocks,) = core(engine).scheduler.kv_cache_manager.get_block_ids(request.request_id)
    seen = 0
    for layer in layers_of(engine):
        number = int(layer.layer_name.split(".")[2])
        bounds = layer.impl.serving.indexes.layers.get(number)
        if bounds is None:
            continue
        assert isinstance(bounds, BlockBounds)
        assert bounds.lower.dtype == torch.float8_e4m3fn
        table = torch.tensor([blocks], dtype=torch.int32)
        kv = layer.impl.view(layer, layer.kv_cache, Rows.on_host(table, [0], [150]))
        assert kv.k_scale is not None
        factor = kv.k_scale.double()[:, None]
        keys = kv.k[blocks].flatten(0, 1)[:144].double() * factor
        for page, own in enumerate(keys.split(16)):
            low, high = (
                side[blocks[page // 2], :, page % 2].double() * factor for side in (bounds.lower, bounds.upper)
            )
            assert torch.equal(own.amin(0), low)
            assert torch.equal(own.amax(0), high)
            seen += 1
    assert seen == 10 * 9


@pytest.mark.parametrize(
    ("policy", "settings", "words"),
    [
        ("quest", {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype=fp8_e5m2 is not valid under a policy: auto"),
        ("lychee_cluster", FP8, "lychee_cluster.* keeps means in the cache's dtype"),
        ("quest", {**FP8, "block_size": 16}, "block_size=16"),
    ],
)
def test_what_cannot_be_decoded_from_is_named(
    policy: str, settings: dict[str, Any], words: str, engines: Engines
) -> None:
    with pytest.raises(Exception, match=words):
        engines.sparse(policy, **settings)


def test_on_a_gpu_vllms_kernel_answers_in_bfloat16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 raises at the first prompt; seen on an H200."""
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)

    def reasons(held: str, dtype: torch.dtype) -> list[str]:
        cache = SimpleNamespace(cache_dtype=held, block_size=16)
        return checks._bytes(SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(dtype=dtype)))

    (reason,) = reasons("fp8", torch.float16)
    assert "dtype=torch.float16" in reason and "--dtype bfloat16" in reason
    assert reasons("fp8", torch.bfloat16) == reasons("auto", torch.float16) == []
