"""A decoder's sizes: from its configuration, or with the hash of its weights from the loaded model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..types import ModelShape
from .weights import hash_of, hashed_rows


def shape_of(config: Any) -> ModelShape:
    """Sizes of a decoder from its configuration."""
    query_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return ModelShape(config.num_hidden_layers, query_heads, kv_heads, head_dim, architecture=config.model_type)


def shape_of_model(model: Any) -> ModelShape:
    """Sizes of a loaded decoder, and the hash of some of its weights: three rows of the input embeddings."""
    shape = shape_of(model.config)
    table = model.get_input_embeddings().weight
    if table.is_meta:
        return shape
    return replace(shape, weights=hash_of(table.detach()[hashed_rows(table.shape[0])]))


def parameters_read(model: Any) -> int:
    """Weights that a decoding step reads: all but an input embedding that is not the output head as well."""
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()
    count = int(sum(parameter.numel() for parameter in model.parameters()))
    # Of such an embedding a step looks up one row.
    return count if head is not None and inputs.weight is head.weight else count - int(inputs.weight.numel())
