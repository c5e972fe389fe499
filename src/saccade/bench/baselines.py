"""Dense decoding attention by others, under the contract of ours: what sparse decoding is held against."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..decode.state import AttentionOperations
from ..errors import SaccadeError
from ..types import KVView, Pooling, Softmax

STOCK = "transformers"
NAMES = (STOCK, "torch-sdpa", "vllm")
"""The stock model with its own cache; in the same model code on our cache torch's attention; on pages vLLM's kernel."""


def choose(names: Sequence[str], device: torch.device, head_dim: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The baselines asked for that can run here, and why others cannot; an unknown name is a SaccadeError."""
    asked = dict.fromkeys(name.strip() for given in names for name in given.split(","))
    if "none" in asked:
        if len(asked) > 1:
            raise SaccadeError(f"baseline none beside {', '.join(sorted({*asked} - {'none'}))} is not valid")
        return (), ()
    for name in asked:
        if name not in NAMES:
            raise SaccadeError(f"unknown baseline {name!r}; valid: {', '.join(NAMES)}, or none")
    reason = _missing(device, head_dim) if "vllm" in asked else None
    if reason is None:
        return tuple(asked), ()
    return tuple(name for name in asked if name != "vllm"), (f"baseline vllm is left out: {reason}",)


def _missing(device: torch.device, head_dim: int) -> str | None:
    if device.type != "cpu":
        return "its CPU kernel is what can be called without an engine"
    found = importlib.util.find_spec("vllm")
    # A folder of that name on the path is found too, but comes from no file.
    if found is None or found.origin is None:
        return "vLLM is not installed (make setup-vllm)"
    from ..adapters.vllm.vllm_api import problem

    moved = problem("benchmark")
    if moved is not None:
        return moved
    from .vllm_kernel import refusal

    return refusal(head_dim)


def folded_sdpa(
    q: Tensor, kv: KVView, softmax: Softmax, *, pooling: Pooling | None = None, out: Tensor | None = None
) -> tuple[Tensor, None]:
    """Torch's kernel in its best form: a group's query heads as queries of one head, the cache read once.

    `enable_gqa` would read it once per query head, eight times slower on a CPU.
    """
    assert pooling is None and out is None and kv.rows.uniform, "a dense policy on rows of one length"
    length = kv.rows.max_len
    keys, values = (tensor.transpose(1, 2)[:, :, :length] for tensor in (kv.k, kv.v))
    queries = q.view(q.shape[0], kv.kv_heads, -1, q.shape[2])
    return scaled_dot_product_attention(queries, keys, values, scale=softmax.scale).reshape(q.shape), None


def operations(name: str, context: int, batch: int) -> AttentionOperations:
    """A baseline's dense attention; it has nothing else."""
    if name == "torch-sdpa":
        return AttentionOperations(dense=folded_sdpa, name=name)
    from .vllm_kernel import VllmAttention

    return AttentionOperations(dense=VllmAttention(context, batch), name=name)
