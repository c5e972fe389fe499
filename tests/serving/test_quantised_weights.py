"""Weights in eight and four bits: the same answers in a batch as one by one, and stock's where a budget covers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from engines import Answer, Engines, answers, greedy, prompts
from safetensors.torch import load_file, save_file
from torch import Tensor

from saccade.checkpoints.bundled import model_path

GROUP, REQUESTS, STEPS = 32, 64, 12
SYMMETRIC: dict[str, Any] = {"type": "int", "symmetric": True}
WEIGHTS = {
    "w8a8": QuantizationArgs(num_bits=8, strategy="channel", **SYMMETRIC),
    "int4": QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP, **SYMMETRIC),
}
ACTIVATIONS = {"w8a8": QuantizationArgs(num_bits=8, strategy="token", dynamic=True, **SYMMETRIC)}
DTYPES = {"w8a8": "float32", "int4": "bfloat16"}
"""vLLM's CPU kernel of four bits knows no float32."""
FORMATS = {"w8a8": "int-quantized", "int4": "pack-quantized"}


def packed(name: str, weight: Tensor, kind: str) -> dict[str, Tensor]:
    """What a checkpoint holds instead of a projection's weight `[out, in]`."""
    args, values = WEIGHTS[kind], weight.float()
    parts = values.unflatten(1, (-1, GROUP if kind == "int4" else values.shape[1]))
    scale, zero = calculate_qparams(parts.amin(2), parts.amax(2), args)
    whole = quantize(values, scale, zero, args, dtype=torch.int8)
    if kind == "w8a8":
        return {name: whole, f"{name}_scale": scale}
    sizes = torch.tensor(weight.shape, device="cpu")
    return {f"{name}_packed": pack_to_int32(whole, 4), f"{name}_scale": scale, f"{name}_shape": sizes}


def checkpoint(folder: Path, kind: str) -> Path:
    """The bundled model with all projections quantised."""
    shutil.copytree(model_path(), folder)
    weights = dict[str, Tensor]()
    for file in folder.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            weights |= packed(name, weight, kind) if name.endswith("proj.weight") else {name: weight}
        file.unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    group: dict[str, Any] = {"targets": ["Linear"], "weights": WEIGHTS[kind].model_dump(mode="json")}
    if kind in ACTIVATIONS:
        group["input_activations"] = ACTIVATIONS[kind].model_dump(mode="json")
    told = {"quant_method": "compressed-tensors", "format": FORMATS[kind], "config_groups": {"group_0": group}}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**told, "ignore": ["lm_head"], "quantization_status": "compressed"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.walk
@pytest.mark.parametrize("kind", FORMATS)
def test_quantised_weights(kind: str, tmp_path: Path, engines: Engines) -> None:
    """Sixty-four requests at once, and each by itself."""
    settings: dict[str, Any] = {"model": str(checkpoint(tmp_path / kind, kind)), "dtype": DTYPES[kind]}
    lengths = [60 + 17 * number % 130 for number in range(REQUESTS // 2)]
    asked = prompts(*lengths) + prompts(*lengths, start=400)

    def told(found: list[Answer]) -> list[tuple[int, ...]]:
        return [answer.tokens for answer in found]

    stock = told(answers(engines.stock(**settings), asked, greedy(STEPS)))
    engines.close()
    sparse = engines.sparse("quest:budget=32", **settings)
    together = told(answers(sparse, asked, greedy(STEPS)))
    assert together == [told(answers(sparse, [one], greedy(STEPS)))[0] for one in asked]
    assert together != stock, "the policy runs"
    engines.close()
    assert told(answers(engines.sparse("quest:budget=4096", **settings), asked, greedy(STEPS))) == stock
