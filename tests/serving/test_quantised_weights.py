"""Quantised weights: the same answers in a batch as one by one, and stock's where a budget covers."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import preset_name_to_scheme
from engines import Answer, Engines, answers, greedy, prompts, runner
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm import LLM

from saccade.checkpoints.bundled import model_path

GROUP, REQUESTS, STEPS = 32, 64, 8
EIGHT_BITS, LARGEST_8 = torch.float8_e4m3fn, 448.0
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight neighbours lies in each four bits of a word, the lowest first."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
LAYERS = re.compile(r"(?:[qkv]|gate|up)_proj$")

Packed = tuple[dict[str, Tensor], Tensor]
"""What a checkpoint holds of a projection `[out, in]`, by the end of its name, and the weight that this stands for."""


def packed_w8a8(weight: Tensor, largest: float) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    whole = (weight / scale).round()
    return {"weight": whole.to(torch.int8), "weight_scale": scale}, whole * scale


def in_groups(weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Whole numbers about 0 `[out, in]` and the scale of each group, of `levels` to either side."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(2) / levels).bfloat16()
    return (groups / scale.unsqueeze(2)).round().clamp(-8, 7).flatten(1), scale


def packed_int4(weight: Tensor, largest: float) -> Packed:
    whole, scale = in_groups(weight, 7)
    sizes = torch.tensor(weight.shape, device="cpu")
    held = {"weight_packed": pack_to_int32(whole.to(torch.int8), 4), "weight_scale": scale, "weight_shape": sizes}
    return held, whole * scale.float().repeat_interleave(GROUP, 1)


def packed_gptq(weight: Tensor, largest: float) -> Packed:
    """Eight rows of `[in, out]` in a word; the zero of symmetric weights is 8, held as one less, its first format."""
    whole, scale = in_groups(weight, 7)
    held = {
        "qweight": pack_to_int32(whole.to(torch.int8).t().contiguous(), 4, packed_dim=0).contiguous(),
        "qzeros": torch.full((scale.shape[1], len(weight) // 8), 0x77777777, dtype=torch.int32),
        "scales": scale.t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return held, whole * scale.float().repeat_interleave(GROUP, 1)


def packed_awq(weight: Tensor, largest: float) -> Packed:
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

    held = {"qweight": words(whole.flatten(1)), "qzeros": words(zero), "scales": scale.t().bfloat16().contiguous()}
    return held, ((whole - zero.unsqueeze(2)) * scale.unsqueeze(2)).flatten(1)


def packed_fp8(weight: Tensor, largest: float) -> Packed:
    """One scale for all, and one for what comes in: a power of two, which leaves ones exact.

    In ModelOpt's format: for others' vLLM quantises once more by an operation that its CPU build lacks.
    """
    scale = torch.tensor(largest / LARGEST_8)
    short = (weight / scale).to(EIGHT_BITS)
    return {"weight": short, "weight_scale": scale, "input_scale": torch.tensor(0.25)}, short.float() * scale


def packed_fp8_rows(weight: Tensor, largest: float) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / LARGEST_8
    short = (weight / scale).to(EIGHT_BITS)
    return {"weight": short, "weight_scale": scale}, short.float() * scale


def compressed(preset: str, form: str, **settings: Any) -> dict[str, Any]:
    """What compressed-tensors writes into a model's configuration."""
    group = preset_name_to_scheme(preset, ["Linear"]).model_dump(mode="json")
    group["weights"] |= settings
    told = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return {**told, "ignore": ["lm_head"], "quantization_status": "compressed"}


@dataclass(frozen=True)
class Kind:
    """A format: how it is packed, what the configuration says, and what vLLM's kernel for it computes in."""

    pack: Callable[[Tensor, float], Packed]
    told: dict[str, Any]
    dtype: str = "bfloat16"


FOUR_BITS = {"bits": 4, "group_size": GROUP}
KINDS = {
    "w8a8": Kind(packed_w8a8, compressed("W8A8", "int-quantized"), "float32"),
    "int4": Kind(packed_int4, compressed("W4A16", "pack-quantized", group_size=GROUP)),
    "gptq": Kind(packed_gptq, {"quant_method": "gptq", **FOUR_BITS, "desc_act": False, "sym": True, "lm_head": False}),
    "awq": Kind(packed_awq, {"quant_method": "awq", **FOUR_BITS, "zero_point": True, "version": "gemm"}),
    "fp8": Kind(packed_fp8, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
    "fp8 rows": Kind(packed_fp8_rows, compressed("FP8_DYNAMIC", "float-quantized")),
}


def checkpoint(folder: Path, kind: Kind) -> dict[str, Tensor]:
    """Write the bundled model with all projections quantised; what they stand for.

    Projections that vLLM fuses are packed by one largest weight, since it gives them one scale.
    """
    shutil.copytree(model_path(), folder)
    read = dict[str, Tensor]()
    for file in folder.glob("*.safetensors"):
        read |= load_file(file)
        file.unlink()
    weights, stand = dict[str, Tensor](), dict[str, Tensor]()
    quantised = {name.removesuffix(".weight"): read.pop(name).float() for name in list(read) if "_proj." in name}
    largest = dict[str, float]()
    for name, weight in quantised.items():
        place = LAYERS.sub("", name)
        largest[place] = max(largest.get(place, 0.0), weight.abs().max().item())
    for name, weight in quantised.items():
        held, stand[name] = kind.pack(weight, largest[LAYERS.sub("", name)])
        weights |= {f"{name}.{end}": part for end, part in held.items()}
    save_file({**read, **weights}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = kind.told
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return stand


def assert_multiplies(engine: LLM, stand: dict[str, Tensor]) -> None:
    """Ones through each of vLLM's projections give the weights that were packed, each rounded once."""
    modules, seen = dict(runner(engine).model.named_modules()), set[str]()
    for name, module in modules.items():
        place, _, last = name.rpartition(".")
        if not last.endswith("_proj"):
            continue
        parts = [f"{place}.{part}" for part in FUSED.get(last, (last,))]
        weight = torch.cat([stand[part] for part in parts])
        ones = torch.eye(weight.shape[1], dtype=runner(engine).dtype)
        torch.testing.assert_close(module(ones)[0].float(), weight.t(), rtol=torch.finfo(ones.dtype).eps, atol=0)
        seen |= set(parts)
    assert seen == set(stand)


@pytest.mark.walk
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights(kind: str, tmp_path: Path, engines: Engines) -> None:
    """Sixty-four requests at once, and each by itself."""
    stand = checkpoint(tmp_path / "model", KINDS[kind])
    settings: dict[str, Any] = {"model": str(tmp_path / "model"), "dtype": KINDS[kind].dtype, "max_num_seqs": REQUESTS}
    lengths = [60 + 17 * number % 130 for number in range(REQUESTS // 2)]
    asked = prompts(*lengths) + prompts(*lengths, start=400)

    def told(found: list[Answer]) -> list[tuple[int, ...]]:
        return [answer.tokens for answer in found]

    engine = engines.stock(**settings)
    assert_multiplies(engine, stand)
    stock = told(answers(engine, asked, greedy(STEPS)))
    del engine
    engines.close()
    sparse = engines.sparse("quest:budget=32", **settings)
    together = told(answers(sparse, asked, greedy(STEPS)))
    assert together == [told(answers(sparse, [one], greedy(STEPS)))[0] for one in asked]
    assert together != stock, "the policy runs"
    del sparse
    engines.close()
    assert told(answers(engines.sparse("quest:budget=4096", **settings), asked, greedy(STEPS))) == stock
