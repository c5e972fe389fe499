"""Model shapes to time with random weights, so that no download is needed; and model folders, whose shape is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from ..errors import ModelFolderError
from .load import ModelSource

_SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
_LLAMA_3 = {"rope_theta": 500_000.0}
_TIED = {"tie_word_embeddings": True}

_GEMMA_3 = {"sliding_window": 1_024, "sliding_window_pattern": 6, **_TIED}
_GPT_OSS = {"sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4}
_QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_QWEN3_NEXT = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}

SHAPES: Mapping[str, tuple[type[PretrainedConfig], dict[str, Any]]] = MappingProxyType(
    {
        name: (kind, {**dict(zip(_SIZES.split(), sizes, strict=True)), **others})
        for name, kind, sizes, others in (
            ("smollm2-135m", LlamaConfig, (49_152, 576, 1_536, 30, 9, 3, 64), _TIED),
            ("llama-3.2-1b", LlamaConfig, (128_256, 2_048, 8_192, 16, 32, 8, 64), {**_LLAMA_3, **_TIED}),
            ("llama-3.1-8b", LlamaConfig, (128_256, 4_096, 14_336, 32, 32, 8, 128), _LLAMA_3),
            ("qwen3-8b", Qwen3Config, (151_936, 4_096, 12_288, 36, 32, 8, 128), {}),
            ("qwen3-30b-a3b", Qwen3MoeConfig, (151_936, 2_048, 6_144, 48, 32, 4, 128), _QWEN3_MOE),
            ("glm-4-9b-1m", GlmConfig, (151_552, 4_096, 13_696, 40, 32, 4, 128), {}),
            ("gemma-3-12b", Gemma3TextConfig, (262_208, 3_840, 15_360, 48, 16, 8, 256), _GEMMA_3),
            ("gpt-oss-20b", GptOssConfig, (201_088, 2_880, 2_880, 24, 64, 8, 64), _GPT_OSS),
            ("qwen3-next-80b", Qwen3NextConfig, (151_936, 2_048, 5_120, 48, 16, 2, 256), _QWEN3_NEXT),
        )
    }
)


def random_model(shape: str, *, positions: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of a shape that `read_config` knows, with random weights and at least so many positions, in eval mode.

    Raises:
        ModelFolderError: as `read_config`.
    """
    config = read_config(shape)
    config.max_position_embeddings = max(positions, config.max_position_embeddings)
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    return model


def is_preset(shape: str) -> bool:
    """Whether a name is that of a preset, or of its first layers."""
    return shape.partition(":")[0] in SHAPES


def read_config(shape: str) -> PretrainedConfig:
    """The configuration of a preset, of its first layers, or of a folder with a `config.json`.

    Args:
        shape: `NAME`, `NAME:LAYERS`, `NAME:LAYERS:EXPERTS` to have so many experts in a layer, or a folder.

    Raises:
        ModelFolderError: if `shape` is none of these, naming the presets, or if the folder's configuration cannot be
            read.
    """
    if is_preset(shape):
        return _slice(shape)
    if not (Path(shape) / "config.json").is_file():
        presets = ", ".join(SHAPES)
        raise ModelFolderError(f"shape {shape!r} is neither a preset ({presets}) nor a folder with a config.json")
    config: PretrainedConfig = ModelSource(shape, shape).config()
    return config


def _slice(shape: str) -> PretrainedConfig:
    """A preset with the layers and experts that its name asks for."""
    name, *asked = shape.split(":")
    kind, sizes = SHAPES[name]
    experts = [key for key in ("num_experts", "num_local_experts") if key in sizes]
    least = dict.fromkeys(["num_hidden_layers", *experts], 1)
    least.update((key, sizes["num_experts_per_tok"]) for key in experts)
    pairs = list(zip(asked, least, strict=False))
    if len(pairs) < len(asked) or not all(
        text.isdecimal() and least[key] <= int(text) <= sizes[key] for text, key in pairs
    ):
        form = f"{name}:LAYERS:EXPERTS" if experts else f"{name}:LAYERS"
        valid = " and ".join(f"{low} to {sizes[key]} {key.rpartition('_')[2]}" for key, low in least.items())
        raise ModelFolderError(f"shape {shape!r} is not valid: {form}, {valid}")
    return kind(**{**sizes, **{key: int(text) for text, key in pairs}})
