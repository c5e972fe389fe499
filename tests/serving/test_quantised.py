"""Numbers of few bits: caches of 8-bit floats, of which stock vLLM decodes the same, and weights; tiles for AMX.

Tiles are read where they lie. vLLM's own packing needs AVX-512 with bfloat16, its attention AMX.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import preset_name_to_scheme
from engines import Answer, Engines, answers, core, eight_bits, force_own_path, greedy, prompt_of, prompts, runner
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm import LLM
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from saccade.adapters.vllm import checks
from saccade.adapters.vllm.worker import cpu
from saccade.adapters.vllm.worker.backend import SparseBuilder
from saccade.checkpoints.bundled import model_path
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
def test_what_is_covered_decodes_as_stock(policy: str, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through our operations, without factors and with them: the same keys and values in the same 8 bits.

    Only the order of sums differs. Where that moves a new number over a step of 8 bits, log-probabilities move by
    0.001; a factor that is 8% off, as the next layer's is, moves them by 0.04 and more in every answer.
    """
    expected = engines.by_stock(coarse, **FP8)
    force_own_path(monkeypatch)
    engine = engines.sparse(policy, **FP8)
    for found, stock in zip(coarse(engine), expected, strict=True):
        for one, other in zip(found, stock, strict=True):
            assert one.tokens == other.tokens
            far = max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
            assert far < 5e-3
    if policy.startswith("quest"):
        check_bounds(engine)


def check_bounds(engine: LLM) -> None:
    """They are numbers of the cache, whose factor says what they stand for: of every full page, in the engine's own."""
    engine.llm_engine.add_request("one", prompt_of(*prompts(150)), greedy(8))
    for _ in range(3):
        engine.llm_engine.step()
    scheduler = core(engine).scheduler
    (blocks,) = scheduler.kv_cache_manager.get_block_ids(*scheduler.requests)
    rows = Rows.on_host(torch.tensor([blocks], dtype=torch.int32), [0], [150])
    for number, layer in enumerate(layers_of(engine)[2:], 2):
        bounds, keys = layer.impl.serving.indexes.layers[number], layer.impl.view(layer, layer.kv_cache, rows).k
        assert bounds.lower.dtype == bounds.upper.dtype == keys.dtype == torch.float8_e4m3fn
        for page, own in enumerate(keys[blocks].flatten(0, 1)[:144].float().split(16)):
            low, high = (side[blocks[page // 2], :, page % 2].float() for side in (bounds.lower, bounds.upper))
            assert torch.equal(own.amin(0), low) and torch.equal(own.amax(0), high)


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
def test_tiles_are_kept_where_they_are_read(dtype: str, reads: bool, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


GROUP, REQUESTS = 32, 64
EIGHT_BITS, LARGEST_8 = torch.float8_e4m3fn, 448.0
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight neighbours lies in each four bits of a word, the lowest first."""

Packed = dict[str, Tensor]
"""What a checkpoint holds of a projection `[out, in]`, by the end of its name."""


def packed_w8a8(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def in_groups(weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Whole numbers about 0 `[out, in]` and the scale of each group, of `levels` to either side."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(2) / levels).bfloat16()
    return (groups / scale.unsqueeze(2)).round().clamp(-8, 7).flatten(1), scale


def packed_int4(weight: Tensor) -> Packed:
    whole, scale = in_groups(weight, 7)
    sizes = torch.tensor(weight.shape, device="cpu")
    return {"weight_packed": pack_to_int32(whole.to(torch.int8), 4), "weight_scale": scale, "weight_shape": sizes}


def packed_gptq(weight: Tensor) -> Packed:
    """Eight rows of `[in, out]` in a word; the zero of symmetric weights is 8, held as one less, its first format."""
    whole, scale = in_groups(weight, 7)
    return {
        "qweight": pack_to_int32(whole.to(torch.int8).t().contiguous(), 4, packed_dim=0).contiguous(),
        "qzeros": torch.full((scale.shape[1], len(weight) // 8), 0x77777777, dtype=torch.int32),
        "scales": scale.t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def packed_awq(weight: Tensor) -> Packed:
    """Eight columns of `[in, out]` in a word, in AWQ's order, and a zero for each group."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (-low / scale).round().clamp(0, 15)
    whole = ((groups / scale.unsqueeze(2)).round() + zero.unsqueeze(2)).clamp(0, 15)

    def words(values: Tensor) -> Tensor:
        ordered = values.t().unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1)
        found: Tensor = pack_to_int32((ordered - 8).to(torch.int8), 4)
        return found

    return {"qweight": words(whole.flatten(1)), "qzeros": words(zero), "scales": scale.t().bfloat16().contiguous()}


def packed_fp8(weight: Tensor) -> Packed:
    """One scale for all, which suits what vLLM fuses too, and one for what comes in.

    In ModelOpt's format: for others' vLLM quantises once more by an operation that its CPU build lacks.
    """
    scale = torch.tensor(2.0**-8)
    short = (weight / scale).clamp(-LARGEST_8, LARGEST_8).to(EIGHT_BITS)
    return {"weight": short, "weight_scale": scale, "input_scale": torch.tensor(0.25)}


def packed_fp8_rows(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / LARGEST_8
    return {"weight": (weight / scale).to(EIGHT_BITS), "weight_scale": scale}


def compressed(preset: str, form: str, **settings: Any) -> dict[str, Any]:
    group = preset_name_to_scheme(preset, ["Linear"]).model_dump(mode="json")
    group["weights"] |= settings
    told = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return {**told, "ignore": ["lm_head"], "quantization_status": "compressed"}


FOUR_BITS = {"bits": 4, "group_size": GROUP}
KINDS: dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any]]] = {
    "w8a8": (packed_w8a8, compressed("W8A8", "int-quantized")),
    "int4": (packed_int4, compressed("W4A16", "pack-quantized", group_size=GROUP)),
    "gptq": (packed_gptq, {"quant_method": "gptq", **FOUR_BITS, "desc_act": False, "sym": True, "lm_head": False}),
    "awq": (packed_awq, {"quant_method": "awq", **FOUR_BITS, "zero_point": True, "version": "gemm"}),
    "fp8": (packed_fp8, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
    "fp8 rows": (packed_fp8_rows, compressed("FP8_DYNAMIC", "float-quantized")),
}
"""Formats: how each is packed, and what the configuration says."""


def write_checkpoint(folder: Path, kind: str) -> None:
    """The bundled model with all projections quantised."""
    pack, told = KINDS[kind]
    shutil.copytree(model_path(), folder)
    weights = dict[str, Tensor]()
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
        file.unlink()
    for name in [name for name in weights if "_proj." in name]:
        held = pack(weights.pop(name).float())
        weights |= {f"{name.removesuffix('.weight')}.{end}": part for end, part in held.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": told}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.walk
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights(kind: str, tmp_path: Path, engines: Engines) -> None:
    """Sixty-four requests at once, and each by itself."""
    write_checkpoint(tmp_path / "model", kind)
    # What vLLM's kernel for it computes in.
    dtype = "float32" if kind == "w8a8" else "bfloat16"
    settings: dict[str, Any] = {"model": str(tmp_path / "model"), "dtype": dtype, "max_num_seqs": REQUESTS}
    lengths = [60 + 17 * number % 130 for number in range(REQUESTS // 2)]
    asked = prompts(*lengths) + prompts(*lengths, start=400)

    def told(engine: LLM, asked: list[list[int]]) -> list[tuple[int, ...]]:
        return [answer.tokens for answer in answers(engine, asked, greedy(8))]

    stock = told(engines.stock(**settings), asked)
    engines.close()
    assert len({token for tokens in stock for token in tokens}) > REQUESTS, "weights are read as they were packed"
    sparse = engines.sparse("quest:budget=32", **settings)
    together = told(sparse, asked)
    assert together == [told(sparse, [one])[0] for one in asked]
    assert together != stock, "the policy runs"
    del sparse
    engines.close()
    assert told(engines.sparse("quest:budget=4096", **settings), asked) == stock
