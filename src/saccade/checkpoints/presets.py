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
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from ..errors import ModelFolderError
from .load import ModelSource

_SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
_LLAMA_3 = {"rope_theta": 500_000.0}
_TIED = {"tie_word_embeddings": True}

_GEMMA_3 = {"sliding_window": 1_024, "sliding_window_pattern": 6, **_TIED}
_GPT_OSS = {"sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4}

SHAPES: Mapping[str, tuple[type[PretrainedConfig], dict[str, Any]]] = MappingProxyType(
    {
        name: (kind, {**dict(zip(_SIZES.split(), sizes, strict=True)), **others})
        for name, kind, sizes, others in (
            ("smollm2-135m", LlamaConfig, (49_152, 576, 1_536, 30, 9, 3, 64), _TIED),
            ("llama-3.2-1b", LlamaConfig, (128_256, 2_048, 8_192, 16, 32, 8, 64), {**_LLAMA_3, **_TIED}),
            ("llama-3.1-8b", LlamaConfig, (128_256, 4_096, 14_336, 32, 32, 8, 128), _LLAMA_3),
            ("qwen3-8b", Qwen3Config, (151_936, 4_096, 12_288, 36, 32, 8, 128), {}),
            ("gemma-3-12b", Gemma3TextConfig, (262_208, 3_840, 15_360, 48, 16, 8, 256), _GEMMA_3),
            ("gpt-oss-20b", GptOssConfig, (201_088, 2_880, 2_880, 24, 64, 8, 64), _GPT_OSS),
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


def read_config(shape: str) -> PretrainedConfig:
    """The configuration of a preset, or of a folder with a `config.json`.

    Raises:
        ModelFolderError: if `shape` is neither, naming the presets, or if the folder's configuration cannot be read.
    """
    if shape in SHAPES:
        kind, sizes = SHAPES[shape]
        return kind(**sizes)
    if not (Path(shape) / "config.json").is_file():
        presets = ", ".join(SHAPES)
        raise ModelFolderError(f"shape {shape!r} is neither a preset ({presets}) nor a folder with a config.json")
    config: PretrainedConfig = ModelSource(shape, shape).config()
    return config
