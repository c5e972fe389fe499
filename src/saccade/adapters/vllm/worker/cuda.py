"""The backend on CUDA: FLASH_ATTN for prompts and dense rows, and where blocks allow it for the chosen pages too."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import CUDAGraphMode, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from ....decode.state import AttentionOperations
from ....errors import ServingError
from ....kernels.dense_decode_scores.api import dense_decode_scores
from ....kernels.sparse_decode.api import sparse_decode
from ....plans.plan import Plan
from ....selection.selector import ScoredSelector
from ....types import KVView, Pooling, Rows, Selection
from .backend import SparseBackend, SparseBuilder, SparseLayer
from .block_tables import Layout, StepTables, Tables, one_token_each, refusal
from .groups import Groups
from .worker import serving_of

logger = logging.getLogger("saccade")


class SaccadeFlashBackend(SparseBackend, FlashAttentionBackend):
    """vLLM's FLASH_ATTN, decoding sparsely."""

    @staticmethod
    def get_impl_cls() -> type[SaccadeFlashAttention]:
        return SaccadeFlashAttention

    @staticmethod
    def get_builder_cls() -> type[SaccadeFlashBuilder]:
        return SaccadeFlashBuilder


class SaccadeFlashBuilder(SparseBuilder, FlashAttentionMetadataBuilder):
    """Prepares a step, and when it is made decides what all steps attend with."""

    # A step's rows are split on the host, and its tensors are new ones: neither fits into a captured graph.
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        serving = serving_of(vllm_config)
        reason = None if serving.page is None else graph_refusal(vllm_config.compilation_config)
        if reason is not None:
            raise ServingError(f"saccade cannot serve {vllm_config.model_config.model} here: {reason}")
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        flash = FlashOperations.of([layer.impl for layer in layers.values()])
        self.groups = Groups(vllm_config, choose(serving.plan, kv_cache_spec.block_size, flash), self.view)
        if vllm_config.parallel_config.rank == 0:
            logger.info("saccade: decoding attends with %s", self.groups.attention.name)


class SaccadeFlashAttention(SparseLayer, FlashAttentionImpl):
    """One layer."""

    def view(self, layer: Any, kv_cache: Tensor, rows: Rows) -> KVView:
        """Of `[blocks, Hkv, block, 2 · d]` by strides: keys are the first d numbers of a token, values the rest."""
        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return KVView(k, v, rows)


class FlashOperations:
    """Decoding attention by vLLM's FlashAttention, of the version that vLLM has chosen for the layers.

    `splits` parts of a request run at once; 0: FlashAttention decides.
    """

    def __init__(self, version: int | None, splits: int) -> None:
        self.version, self._splits = version, splits
        self._step: StepTables | None = None

    @classmethod
    def of(cls, layers: list[Any]) -> FlashOperations:
        """With the version and the settings of some layers' own, which all have the same."""
        layer = layers[0]
        return cls(layer.vllm_flash_attn_version, 1 if layer.batch_invariant_enabled or layer.fa4_hd256 else 0)

    def dense(
        self, q: Tensor, kv: KVView, *, scale: float, pooling: Pooling | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `dense_decode_scores`, which also makes the scores where they are wanted: FlashAttention keeps none."""
        if pooling is not None:
            return dense_decode_scores(q, kv, scale=scale, pooling=pooling)
        rows = kv.rows
        table = rows.page_table[:, : -(-rows.max_len // kv.page)]
        tables = Tables(table, rows.seq_lens, one_token_each(rows.batch, q.device))
        return self._attend(q, kv.k, kv.v, tables, scale), None

    def sparse(self, q: Tensor, kv: KVView, selection: Selection, *, scale: float) -> Tensor:
        """As `sparse_decode`, of pages of whole blocks; every set holds the row's last token."""
        layout = Layout.of(kv)
        tables = self._of(kv.rows, layout, selection.unit, selection.groups).of(selection)
        if selection.groups == 1:
            return self._attend(q, kv.k, kv.v, tables, scale)
        batch, query_heads, head_dim = q.shape
        queries = q.reshape(batch * selection.groups, query_heads // selection.groups, head_dim)
        k, v = layout.one_head_pages(kv.k), layout.one_head_pages(kv.v)
        return self._attend(queries, k, v, tables, scale).view(q.shape)

    def _of(self, rows: Rows, layout: Layout, unit: int, groups: int) -> StepTables:
        """What the layers of a step share; a step is known by its rows."""
        held = self._step
        if held is None or held.key[0] is not rows or held.key[1:] != (layout, unit, groups):
            held = self._step = StepTables(rows, layout, unit, groups)
        return held

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, scale: float) -> Tensor:
        # By attribute, for without CUDA vLLM's module has no such name.
        out: Tensor = flash_attn.flash_attn_varlen_func(
            q=q,
            k=canonicalize_singleton_dim_strides(k),
            v=canonicalize_singleton_dim_strides(v),
            cu_seqlens_q=tables.starts,
            max_seqlen_q=1,
            seqused_k=tables.seq_lens,
            max_seqlen_k=tables.blocks.shape[1] * k.shape[1],
            softmax_scale=scale,
            causal=False,
            block_table=tables.blocks,
            num_splits=self._splits,
            fa_version=self.version,
        )
        return out


def choose(plan: Plan, block: int, flash: FlashOperations) -> AttentionOperations:
    """What an engine's layers attend with, decided by the policy's unit and the tokens of a cache block, once."""
    name = f"FlashAttention {flash.version}"
    if plan.selector is None:
        return AttentionOperations(flash.dense, name=name)
    own = [] if plan.selector.fused_pooling is None else ["layers that keep scores"]
    if not plan.roles.uniform:
        own.append("layers whose heads differ")
    # All but scored pages come as single tokens.
    reason = refusal(plan.selector.scorer.unit if isinstance(plan.selector, ScoredSelector) else 1, block)
    if reason is not None:
        own.append(f"sets ({reason})")
    sets = "" if reason is not None else " and for sets, as block tables"
    rest = f"; saccade's own operations for {' and for '.join(own)}" if own else ""
    sparse = flash.sparse if reason is None else sparse_decode
    return AttentionOperations(flash.dense, sparse, name=f"{name} for all tokens{sets}{rest}")


def graph_refusal(compilation: Any) -> str | None:
    """Why page bounds would go stale under these CUDA graphs, or None.

    Bounds are recomputed by Python code that runs with the cache's update; a graph that captured it would repeat
    neither the code nor the step's positions.
    """
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return None
    if envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        return "VLLM_USE_BREAKABLE_CUDAGRAPH=1 captures the cache's update, and page bounds are part of it; set it to 0"
    if not compilation.splitting_ops_contain_kv_cache_update():
        return (
            "these compilation options capture the cache's update in CUDA graphs, and page bounds are part of it; "
            "leave splitting_ops and use_inductor_graph_partition as they are, or pass --enforce-eager"
        )
    return None
