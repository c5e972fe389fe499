"""vLLM's CPU attention kernel by itself, under the contract of our dense operation."""

from typing import Any

import torch
import vllm._custom_ops as kernels
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from saccade.types import KVView, Pooling, Softmax


def refusal(head_dim: int) -> str | None:
    """Why the kernel cannot take a model, or None."""
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return "this build of vLLM has no CPU kernels"
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    return None if head_dim in sizes else f"its CPU kernel takes heads of {', '.join(map(str, sizes))}, not {head_dim}"


class VllmAttention:
    """vLLM's CPU kernel on pages of its own: filled from the first call's cache, then kept like vLLM's, token by token.

    Args:
        context: tokens cached before the decoded one.
        batch: rows.
    """

    block = 32

    def __init__(self, context: int, batch: int) -> None:
        per_row = context // self.block + 1
        self._table = torch.arange(batch * per_row, dtype=torch.int32, device="cpu").view(batch, per_row)
        self._slots = self._table[:, context // self.block].long() * self.block + context % self.block
        self._lengths = torch.full((batch,), context + 1, dtype=torch.int32, device="cpu")
        self._starts = torch.arange(batch + 1, dtype=torch.int32, device="cpu")
        self._caches: dict[int, Tensor] = {}
        self._plan: Any = None

    def __call__(
        self, q: Tensor, kv: KVView, softmax: Softmax, *, pooling: Pooling | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Attention `[B, Hq, d]` to all tokens of a cache `[B, capacity, Hkv, d]`, whose last one is new."""
        isa = _get_attn_isa(q.dtype, self.block, kv.head_dim)
        cache = self._caches.get(kv.k.data_ptr())
        if cache is None:
            cache = self._caches[kv.k.data_ptr()] = self._filled(kv, isa)
        keys, values = cache.chunk(2, dim=2)
        last = kv.rows.max_len - 1
        kernels.cpu_attn_reshape_and_cache(
            kv.k[:, last].contiguous(), kv.v[:, last].contiguous(), keys, values, self._slots, isa
        )
        out = torch.empty_like(q) if out is None else out
        if self._plan is None:
            self._plan = kernels.cpu_attn_get_scheduler_metadata(
                num_reqs=q.shape[0],
                num_heads=q.shape[1],
                num_kv_heads=kv.kv_heads,
                head_dim=kv.head_dim,
                seq_lens=self._lengths,
                dtype=q.dtype,
                query_start_loc=self._starts,
                causal=True,
                sliding_window_size=-1,
                isa=isa,
                enable_kv_split=True,
            )
        kernels.cpu_attention_with_kv_cache(
            query=q.contiguous(),
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=self._starts,
            seq_lens=self._lengths,
            scale=softmax.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self._table,
            softcap=0.0,
            scheduler_metadata=self._plan,
            s_aux=None,
        )
        return out, None

    def _filled(self, kv: KVView, isa: str) -> Tensor:
        batch, length = kv.rows.batch, kv.rows.max_len
        shape = self._table.numel(), kv.kv_heads, 2 * self.block, kv.head_dim
        cache = torch.zeros(shape, dtype=kv.k.dtype, device="cpu")
        keys, values = cache.chunk(2, dim=2)
        for row in range(batch):
            slots = self._table[row, 0].long() * self.block + torch.arange(length, device="cpu")
            kernels.cpu_attn_reshape_and_cache(
                kv.k[row, :length].contiguous(), kv.v[row, :length].contiguous(), keys, values, slots, isa
            )
        return cache
