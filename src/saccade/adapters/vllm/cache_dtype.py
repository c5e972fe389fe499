"""What vLLM's `--kv-cache-dtype` may be under a policy, and what the bytes of such a cache are."""

from typing import Any

import torch
from torch import Tensor

FP8 = ("fp8", "fp8_e4m3")
"""Two names of one format: numbers of 8 bits, 4 of them the exponent's, times a factor per layer."""

VALID = ("auto", "bfloat16", "float16", *FP8)
"""What can be decoded from; vLLM's own backends take fewer or more, by device."""


def number_type(cache_dtype: str, model: torch.dtype) -> torch.dtype:
    """Of the numbers in a cache of a valid dtype; `model` is what the model computes in."""
    if cache_dtype in FP8:
        return torch.float8_e4m3fn
    found: torch.dtype = model if cache_dtype == "auto" else getattr(torch, cache_dtype)
    return found


def as_numbers(kv_cache: Tensor, cache_dtype: str) -> Tensor:
    """A layer's cache as the numbers in it: where they have 8 bits, vLLM says bytes."""
    return kv_cache.view(torch.float8_e4m3fn) if cache_dtype in FP8 else kv_cache


def digits(query: Tensor, scale: Tensor) -> Tensor:
    """What queries `[T, Hq, d]` in 8 bits stand for; one factor for all, or one for each KV head."""
    factors = scale.view(-1, 1, 1)
    numbers: Tensor = query.unflatten(1, (len(factors), -1)).float() * factors
    return numbers.flatten(1, 2)


def bounds_bytes(block: int, page: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """What a block of `block` tokens needs for the lower and upper bounds of its pages."""
    return block // page * kv_heads * 2 * head_dim * itemsize


def reasons_against_dtype(cache_config: Any) -> list[str]:
    """Why a cache of an engine's dtype cannot be decoded from; empty if it can."""
    held, apart = cache_config.cache_dtype, cache_config.kv_cache_dtype_skip_layers
    if held not in VALID:
        return [f"kv_cache_dtype={held} is not valid under a policy: {', '.join(VALID)} are"]
    if held in FP8 and apart:
        told = ",".join(apart)
        return [f"kv_cache_dtype_skip_layers={told} parts layers among which a policy selects once; leave it out"]
    return []
