"""The backend on CPUs: vLLM's own for prompts and dense rows, over a cache whose keys lie `[d, block]`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from ....errors import ServingError
from ....types import KVView, Rows
from ..cache_dtype import as_numbers
from .backend import SparseBackend, SparseBuilder, SparseLayer
from .groups import Groups


class SaccadeCPUBackend(SparseBackend, CPUAttentionBackend):
    """vLLM's CPU backend, decoding sparsely."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any multiple of 16 tokens, so that a block can be as small as a policy's page."""
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[SaccadeCPUAttention]:
        return SaccadeCPUAttention

    @staticmethod
    def get_builder_cls() -> type[SaccadeCPUBuilder]:
        return SaccadeCPUBuilder


class SaccadeCPUBuilder(SparseBuilder, CPUAttentionMetadataBuilder):
    """Prepares a step."""

    isa: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups = Groups(self.vllm_config, self.view)
        if self.isa == "amx":
            # AMX packs keys in a way that strides cannot express.
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)
        if self.isa not in ("vec", "vec16"):
            raise ServingError(f"vLLM's kernels for {self.isa!r} lay out keys in a way that saccade does not know")


class SaccadeCPUAttention(SparseLayer, CPUAttentionBackendImpl):
    """One layer."""

    def view(self, layer: Any, kv_cache: Tensor, rows: Rows) -> KVView:
        """Of `[blocks, Hkv, block, 2 · d]`: a head's keys `[d, block]`, then its values."""
        kv_cache = as_numbers(kv_cache, self.kv_cache_dtype)
        blocks, heads, block, width = kv_cache.shape
        d = width // 2
        halves = kv_cache.view(blocks, heads, 2, block * d)
        k = halves[:, :, 0].view(blocks, heads, d, block).permute(0, 3, 1, 2)
        v = halves[:, :, 1].view(blocks, heads, block, d).permute(0, 2, 1, 3)
        return KVView(k, v, rows, *self.scales(layer), sinks=self.sinks, soft_cap=self.logits_soft_cap or None)
