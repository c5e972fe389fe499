"""Sizes of model shapes that have a name; `--help`, which lists them, does not wait for transformers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
_LLAMA_3 = {"rope_theta": 500_000.0}
_TIED = {"tie_word_embeddings": True}

_GEMMA_3 = {"sliding_window": 1_024, "sliding_window_pattern": 6, **_TIED}
_GPT_OSS = {"sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4}
_QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_QWEN3_NEXT = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}

SHAPES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        name: {"model_type": kind, **dict(zip(_SIZES.split(), sizes, strict=True)), **others}
        for name, kind, sizes, others in (
            ("smollm2-135m", "llama", (49_152, 576, 1_536, 30, 9, 3, 64), _TIED),
            ("llama-3.2-1b", "llama", (128_256, 2_048, 8_192, 16, 32, 8, 64), {**_LLAMA_3, **_TIED}),
            ("llama-3.1-8b", "llama", (128_256, 4_096, 14_336, 32, 32, 8, 128), _LLAMA_3),
            ("qwen3-8b", "qwen3", (151_936, 4_096, 12_288, 36, 32, 8, 128), {}),
            ("qwen3-30b-a3b", "qwen3_moe", (151_936, 2_048, 6_144, 48, 32, 4, 128), _QWEN3_MOE),
            ("glm-4-9b-1m", "glm", (151_552, 4_096, 13_696, 40, 32, 4, 128), {}),
            ("gemma-3-12b", "gemma3_text", (262_208, 3_840, 15_360, 48, 16, 8, 256), _GEMMA_3),
            ("gpt-oss-20b", "gpt_oss", (201_088, 2_880, 2_880, 24, 64, 8, 64), _GPT_OSS),
            ("qwen3-next-80b", "qwen3_next", (151_936, 2_048, 5_120, 48, 16, 2, 256), _QWEN3_NEXT),
        )
    }
)

PRESETS = ", ".join(SHAPES)
