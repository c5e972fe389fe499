"""Model shapes to time with random weights, so that no download is needed; and model folders, whose shape is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from ..errors import ModelFolderError
from .load import ModelSource

_LLAMA_3 = {"vocab_size": 128_256, "rope_theta": 500_000.0}

SHAPES: Mapping[str, tuple[type[PretrainedConfig], dict[str, Any]]] = MappingProxyType(
    {
        "smollm2-135m": (
            LlamaConfig,
            {
                "vocab_size": 49_152,
                "hidden_size": 576,
                "intermediate_size": 1_536,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "tie_word_embeddings": True,
            },
        ),
        "llama-3.2-1b": (
            LlamaConfig,
            {
                **_LLAMA_3,
                "hidden_size": 2_048,
                "intermediate_size": 8_192,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "tie_word_embeddings": True,
            },
        ),
        "llama-3.1-8b": (
            LlamaConfig,
            {
                **_LLAMA_3,
                "hidden_size": 4_096,
                "intermediate_size": 14_336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            },
        ),
        "qwen3-8b": (
            Qwen3Config,
            {
                "vocab_size": 151_936,
                "hidden_size": 4_096,
                "intermediate_size": 12_288,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
        ),
    }
)


def random_model(shape: str, *, positions: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of the named shape (or of the config in a folder) with random weights, in eval mode.

    Args:
        shape: a preset's name or a folder with a `config.json`.
        positions: at least this many positions are made valid.
        dtype, device: of all weights.

    Raises:
        ModelFolderError: if `shape` is neither; the message lists the presets.
    """
    config = read_config(shape)
    config.max_position_embeddings = max(positions, config.max_position_embeddings)
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.eval()
    return model


def read_config(shape: str) -> PretrainedConfig:
    """The configuration of a preset or folder.

    Raises:
        ModelFolderError: if `shape` is neither, naming the presets, or if the folder's configuration cannot be read.
    """
    if shape in SHAPES:
        kind, sizes = SHAPES[shape]
        return kind(**sizes)
    if not (Path(shape) / "config.json").is_file():
        raise ModelFolderError(
            f"shape {shape!r} is neither a preset ({', '.join(SHAPES)}) nor a folder with a config.json"
        )
    config: PretrainedConfig = ModelSource(shape, shape).config()
    return config
