"""What vLLM's configuration says of the model."""

from __future__ import annotations

from typing import Any

from ...types import ModelShape
from ..hf.weights import stored_hash


def shape_of(vllm_config: Any) -> ModelShape:
    """Sizes of the whole decoder, over all tensor-parallel ranks, and the hash of its weights where files are here."""
    config = vllm_config.model_config
    text = config.hf_text_config
    return ModelShape(
        text.num_hidden_layers,
        text.num_attention_heads,
        config.get_total_num_kv_heads(),
        config.get_head_size(),
        architecture=text.model_type,
        weights=stored_hash(str(config.model)),
    )
