"""A decoder's sizes, and the hash that tells its weights from another's: three rows of the input embeddings."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UnsupportedModelError
from ..types import ModelShape
from .hub import SHARDS, WEIGHTS, find
from .unsupported import mixed_kinds, reasons_in_sizes, sizes_in, sources_in, values_in

_TABLES = (
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "model.decoder.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
    "transformer.word_embeddings.weight",
)
"""What checkpoints call the input embeddings."""

_TINY = 2.0**-14
"""Smaller values are subnormal in float16, which rounds some of them; all others of bfloat16 it holds exactly."""


def shape_of(config: Any) -> ModelShape:
    """Sizes of a decoder from its configuration.

    Raises:
        UnsupportedModelError: if it names none, or others for some layers with full attention than for others.
    """
    config = config.get_text_config(decoder=True)
    reasons = reasons_in_sizes(config)
    if reasons:
        raise UnsupportedModelError(f"{config.model_type} is no plain decoder: " + "; ".join(reasons))
    _, query_heads, kv_heads, head_dim = (next(iter(values), 0) or 0 for values in sizes_in(config).values())
    heads = (query_heads, kv_heads or query_heads, head_dim or config.hidden_size // query_heads)
    kinds = mixed_kinds(config, getattr(config, "max_position_embeddings", None))
    window, shared = window_of(config) if kinds else None, sources_in(config)
    told = ModelShape(config.num_hidden_layers, *heads, config.model_type, None, *widths(config), kinds, window, shared)
    return replace(told, value_dim=getattr(config, "v_head_dim", None))


def window_of(config: Any) -> int | None:
    """Tokens that layers with a window keep, or those with chunks; None where they have other heads, or differ."""
    if any(len(set(values_in(config, name))) > 1 for name in ("num_key_value_heads", "head_dim")):
        return None
    # MiMo gives its windows heads of their own.
    if getattr(config, "swa_num_key_value_heads", None) not in (None, getattr(config, "num_key_value_heads", None)):
        return None
    known = {one for name in ("sliding_window", "attention_chunk_size") for one in values_in(config, name) if one}
    return known.pop() if len(known) == 1 else None


def widths(config: Any) -> tuple[int | None, int | None]:
    """Hidden and intermediate size, where a configuration has one number for all layers."""
    found = (getattr(config, name, None) for name in ("hidden_size", "intermediate_size"))
    hidden, intermediate = (width if isinstance(width, int) else None for width in found)
    return hidden, intermediate


def shape_of_model(model: Any) -> ModelShape:
    """Sizes of a loaded decoder, and the hash of its weights."""
    shape = shape_of(model.config)
    table = model.get_input_embeddings().weight
    if table.is_meta:
        return shape
    return replace(shape, weights=hash_of(table.detach()[hashed_rows(table.shape[0])]))


def hashed_rows(vocabulary: int) -> list[int]:
    return [0, vocabulary // 2, vocabulary - 1]


def hash_of(rows: Tensor) -> str:
    """The hash of rows `[3, hidden]`, rounded so that a bfloat16 model in another dtype is still the same one."""
    rounded = rows.to("cpu", torch.bfloat16).contiguous()
    rounded = rounded.masked_fill(rounded.abs() < _TINY, 0)
    return hashlib.sha256(bytes(rounded.view(torch.uint8).flatten().tolist())).hexdigest()[:16]


def stored_hash(model: str) -> str | None:
    """The hash of a folder's or a cached hub model's safetensors, of which three rows are read.

    None where there are no such files, or none of their tensors has a usual name.
    """
    try:
        whole, index = find(model, WEIGHTS), find(model, SHARDS)
        shards = {} if whole is not None or index is None else json.loads(index.read_text())["weight_map"]
        for name in _TABLES:
            file = whole or (find(model, shards[name]) if name in shards else None)
            if file is None:
                continue
            with safe_open(str(file), framework="pt") as tensors:
                if name in tensors.keys():  # noqa: SIM118  # no mapping
                    table = tensors.get_slice(name)
                    return hash_of(torch.cat([table[row : row + 1] for row in hashed_rows(table.get_shape()[0])]))
    except (OSError, ValueError, LookupError, TypeError, SafetensorError):
        return None  # whoever loads these files says what is wrong with them
    return None
