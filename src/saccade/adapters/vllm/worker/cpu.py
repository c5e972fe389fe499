"""The backend on CPUs: vLLM's own for prompts and dense rows, over a cache whose keys lie `[d, block]`."""

from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from ....errors import ServingError
from ....kernels._native.library import reads_tiles
from ....types import KVView, Rows
from ..cache_dtype import FP8, as_numbers
from .backend import SparseBackend, SparseBuilder, SparseLayer
from .room import Room, text_of
from .sparse import SparseRows


class SaccadeCPUBuilder(SparseBuilder, CPUAttentionMetadataBuilder):
    """Prepares a step."""

    isa: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sparse = SparseRows(self.vllm_config, self.view, Room(text_of(self.vllm_config)))
        group = self.num_heads // self.num_kv_heads
        if self.isa == "amx" and (self.kv_cache_dtype in FP8 or not reads_tiles(self.head_dim, group)):
            # Tiles that our library does not read: another layout, for which vLLM has slower kernels.
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)
        if self.isa not in ("vec", "vec16", "amx"):
            raise ServingError(f"vLLM's kernels for {self.isa!r} lay out keys in a way that saccade does not know")


class SaccadeCPUAttention(SparseLayer, CPUAttentionBackendImpl):
    """One layer."""

    def view(self, layer: Any, kv_cache: Tensor, rows: Rows) -> KVView:
        """Of `[blocks, Hkv, block, 2 · d]`: a head's keys, `[d, block]` or in AMX's tiles, then its values."""
        kv_cache, tiled = as_numbers(kv_cache, self.kv_cache_dtype), layer.isa == "amx"
        blocks, heads, block, width = kv_cache.shape
        d = width // 2
        k, v = kv_cache.view(blocks, heads, 2, block, d).permute(2, 0, 3, 1, 4)
        if not tiled:
            k = kv_cache.view(blocks, heads, width, block)[:, :, :d].permute(0, 3, 1, 2)
        return KVView(k, v, rows, *self.scales(layer), tiled=tiled)


class SaccadeCPUBackend(SparseBackend, CPUAttentionBackend):
    """vLLM's CPU backend, decoding sparsely."""

    layer, builder = SaccadeCPUAttention, SaccadeCPUBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any multiple of 16 tokens, so that a block can be as small as a policy's page."""
        return [MultipleOf(16)]
