"""Caches on a CPU: 8-bit floats, of which stock vLLM decodes the same, with bounds that bound; tiles for AMX.

Tiles are read where they lie. vLLM's own packing needs AVX-512 with bfloat16, its attention AMX.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Answer, Engines, answers, core, eight_bits, force_own_path, greedy, prompt_of, prompts, runner
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from saccade.adapters.vllm import checks
from saccade.adapters.vllm.worker import cpu
from saccade.adapters.vllm.worker.backend import SparseBuilder
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


def test_on_a_gpu_vllms_kernel_answers_in_bfloat16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 raises at the first prompt; seen on an H200."""
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)

    def reasons(held: str, dtype: torch.dtype) -> list[str]:
        cache = SimpleNamespace(cache_dtype=held, block_size=16)
        return checks._bytes(SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(dtype=dtype)))

    (reason,) = reasons("fp8", torch.float16)
    assert "dtype=torch.float16" in reason and "--dtype bfloat16" in reason
    assert reasons("fp8", torch.bfloat16) == reasons("auto", torch.float16) == []


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM's library for this processor has no packing for AMX"
)
@pytest.mark.parametrize(("dim", "block"), [(32, 32), (64, 128), (96, 96), (128, 32), (256, 64)])
def test_a_layer_reads_what_vllm_has_packed(dim: int, block: int) -> None:
    current_platform.import_kernels()
    heads, count = 3, 3 * block - 5
    k, v = torch.randn(2, count, heads, dim).bfloat16()
    cache = torch.full((5, heads, block, 2 * dim), torch.nan, dtype=torch.bfloat16)
    halves = cache.view(5, heads, 2 * block, dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        k, v, *halves, torch.arange(count) + block, "amx", k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    layer: Any = SimpleNamespace(kv_cache_dtype="auto", scales=lambda layer: (None, None))
    rows = Rows.on_host(torch.arange(5, dtype=torch.int32)[None], [block], [count])
    kv = cpu.SaccadeCPUAttention.view(layer, SimpleNamespace(isa="amx"), cache, rows)
    assert kv.tiled and (kv.page, kv.kv_heads, kv.head_dim) == (block, heads, dim)
    found = kv.in_rows()
    for got, want in ((found.k, k), (found.v, v)):
        assert torch.equal(got.reshape(-1, heads, dim)[block : block + count], want)


@pytest.mark.parametrize(
    ("dtype", "reads", "isa"), [("auto", True, "amx"), ("auto", False, "vec"), ("fp8", True, "vec")]
)
def test_tiles_are_kept_where_the_library_reads_them(
    dtype: str, reads: bool, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(builder: Any) -> None:
        vars(builder).update(isa="amx", kv_cache_dtype=dtype, head_dim=64, layer_names=["one"], vllm_config=None)
        vars(builder).update(num_heads=8, num_kv_heads=2)

    told: list[str] = []
    monkeypatch.setattr(SparseBuilder, "__init__", made)
    monkeypatch.setattr(cpu, "SparseRows", lambda config, view, room: None)
    monkeypatch.setattr(cpu, "text_of", lambda config: None)
    monkeypatch.setattr(cpu, "reads_tiles", lambda *sizes: reads and sizes == (64, 4))
    monkeypatch.setattr(cpu.SaccadeCPUBuilder, "_set_isa_to_layers", lambda builder, names: told.extend(names))
    assert (cpu.SaccadeCPUBuilder().isa, told) == (isa, [] if isa == "amx" else ["one"])
