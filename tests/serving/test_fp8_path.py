"""The CUDA backend over a cache of 8-bit floats, as `test_cuda_path` runs it over one of float32.

Keys and values are told to the oracle as they come out of the cache. Queries are numbers that 8 bits hold, so that it
does not matter whose kernel answers, vLLM's with quantised queries or ours with all digits, unless a test says so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_engine import HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS, CudaEngine, Row, to_fp8
from cuda_requests import PAGES, QKV, REUSED_PAGES, Requests
from engines import force_own_path
from torch import Tensor
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import flash_attn

from saccade.adapters.vllm.worker import cuda
from saccade.adapters.vllm.worker.page_bounds import BlockBounds
from saccade.types import Rows


def through_cache(numbers: Tensor, scale: Tensor) -> Tensor:
    return to_fp8(numbers, scale).float() * scale


class QuantisedRequests(Requests):
    """Keeps what the cache makes of keys and values."""

    def _draw(self, tokens: int) -> tuple[QKV, QKV]:
        given = [
            (through_cache(q, layer._q_scale), k, v)
            for layer, (q, k, v) in zip(self._engine.layers, self._engine.random_qkv(tokens), strict=True)
        ]
        held = [
            (q, through_cache(k, layer._k_scale), through_cache(v, layer._v_scale))
            for layer, (q, k, v) in zip(self._engine.layers, given, strict=True)
        ]
        return given, held


@pytest.mark.parametrize(
    ("policy", "block", "layout"),
    [
        (PAGES, 32, "LBHNC"),
        (PAGES + ",heads=query", 16, "BLHNC"),
        (REUSED_PAGES, 16, "BLNHC"),
        ("composed:scorer=exact,page=32,budget=96,roles=layers:2+6", 16, "LHBNC"),
        ("streaming:budget=64", 16, "LBNHC"),
        ("less_is_more:budget=64,reselect=7", 16, "BLNHC"),
        ("dense", 16, "LBNHC"),
    ],
)
def test_every_row_gets_what_the_policy_says(
    policy: str, block: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_own_path(monkeypatch)
    engine = CudaEngine(monkeypatch, policy, block=block, layout=layout, cache="fp8")
    QuantisedRequests(engine).run_mixed()


def test_our_kernels_are_asked_with_all_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own layers would have 4 bits of each query: what those answer is far off what ours do."""

    class AllDigits(QuantisedRequests):
        def _draw(self, tokens: int) -> tuple[QKV, QKV]:
            given, held = super()._draw(tokens)
            shift = [(q * (1 + torch.rand_like(q) / 16), k, v) for q, k, v in given]
            return shift, [(q, k, v) for (q, _, _), (_, k, v) in zip(shift, held, strict=True)]

    force_own_path(monkeypatch)
    engine = CudaEngine(monkeypatch, "streaming:budget=64", cache="fp8")
    requests: Any = QuantisedRequests(engine)
    requests.run([Row(0, 150, 150, True)])
    decoding = AllDigits(engine)
    decoding._fed = requests._fed
    decoding.run([Row(0, 151)])
    with pytest.raises(AssertionError):
        decoding.run([Row(1, 40, 40, True)])


@pytest.mark.parametrize("heads", [1, KV_HEADS])
def test_queries_are_quantised_for_vllms_kernel_by_its_layers_factor(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for all heads, or one for each KV head and the query heads that it serves."""
    engine = CudaEngine(monkeypatch, "dense", cache="fp8")
    layer = engine.layers[3]
    assert layer.query_quant is None
    layer._q_scale = torch.linspace(0.01, 0.05, heads).squeeze(0)
    query, seen = torch.randn(5, QUERY_HEADS, HEAD_DIM), []
    monkeypatch.setattr(cuda.FlashAttentionImpl, "forward", lambda impl, _, given, *__: seen.append((impl, given)))
    layer.impl.stock(layer, query, None, None, None, None, None)
    ((impl, given),) = seen
    # Without it vLLM leaves the factor out.
    assert impl.supports_quant_query_input
    each = layer._q_scale.expand(KV_HEADS).repeat_interleave(QUERY_HEADS // KV_HEADS)[:, None]
    assert given.shape == query.shape
    assert torch.equal(given.float(), to_fp8(query, each).float())


def test_scales_are_read_where_the_engine_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view holds no copy: a graph that was captured before sees what is written there later."""
    engine = CudaEngine(monkeypatch, PAGES, cache="fp8")
    layer = engine.layers[2]
    kv = layer.impl.view(layer, layer.kv_cache, Rows.on_host(engine.tables[:1], [0], [1]))
    assert (kv.k.dtype, kv.v.dtype) == (torch.float8_e4m3fn,) * 2
    layer._k_scale.fill_(7.0)
    layer._v_scale.fill_(9.0)
    assert kv.k_scale is not None and kv.v_scale is not None
    assert (kv.k_scale.tolist(), kv.v_scale.tolist()) == ([7.0] * KV_HEADS, [9.0] * KV_HEADS)
    plain = CudaEngine(monkeypatch, PAGES).layers[2]
    kv = plain.impl.view(plain, plain.kv_cache, Rows.on_host(engine.tables[:1], [0], [1]))
    assert (kv.k.dtype, kv.k_scale, kv.v_scale) == (torch.float32, None, None)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLHNC"])
def test_bounds_are_numbers_of_the_cache(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each block, in its bytes: the smallest and largest of a full page's own numbers, none rounded."""
    engine = CudaEngine(monkeypatch, PAGES, block=32, layout=layout, cache="fp8")
    content = 32 * KV_HEADS * 2 * HEAD_DIM
    assert engine.spec.unpadded_page_size_bytes == content
    assert engine.spec.extra_page_bytes == content // 16
    # FLASH_ATTN reads in 16 bytes.
    assert all(layer.kv_cache.stride(0) % 16 == 0 for layer in engine.layers)
    QuantisedRequests(engine).run([Row(0, 75, 75, True)])
    layer, bounds = engine.layers[4], engine.serving.indexes.layers[4]
    assert isinstance(bounds, BlockBounds)
    assert bounds.lower.dtype == bounds.upper.dtype == torch.float8_e4m3fn
    assert bounds.lies_in(layer.kv_cache)
    kv = layer.impl.view(layer, layer.kv_cache, Rows.on_host(engine.tables[:1], [0], [75]))
    assert kv.k_scale is not None
    table = engine.tables[0]
    keys = kv.k[table].flatten(0, 1)[:75].double()
    for page in range(75 // 16):
        own = keys[page * 16 : (page + 1) * 16] * kv.k_scale.double()[:, None]
        block, inside = int(table[page // 2]), page % 2
        low, high = (
            side[block, :, inside].double() * kv.k_scale.double()[:, None] for side in (bounds.lower, bounds.upper)
        )
        assert torch.equal(own.amin(0), low)
        assert torch.equal(own.amax(0), high)


@pytest.mark.parametrize("supported", [True, False])
def test_vllm_judges_what_a_policy_can_decode_from_and_we_the_rest(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other formats it would say that a backend named CUSTOM does not support them; `checks` names those that go."""
    monkeypatch.setattr(flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *_, **__: supported)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    asked: dict[str, Any] = {
        **{"head_size": 128, "dtype": torch.bfloat16, "block_size": 16, "attn_type": "decoder"},
        **dict.fromkeys(("use_mla", "has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales"), False),
    }
    found = {
        name: cuda.SaccadeFlashBackend.validate_configuration(
            device_capability=DeviceCapability(9, 0), kv_cache_dtype=name, **asked
        )
        for name in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")
    }
    assert [name for name, reasons in found.items() if reasons] == ([] if supported else ["fp8", "fp8_e4m3"])


def test_layers_differ_in_their_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a layer that reads another's would pass for right."""
    engine = CudaEngine(monkeypatch, PAGES, cache="fp8")
    for name in ("_q_scale", "_k_scale", "_v_scale"):
        assert len({float(getattr(layer, name)) for layer in engine.layers}) == LAYERS
