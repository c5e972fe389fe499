"""The backend on CUDA: FLASH_ATTN for prompts and dense layers, our own kernels for what selects or is selected."""

import logging
from typing import Any

import torch
from torch import Tensor
from vllm._custom_ops import scaled_fp8_quant
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from ....decode.capture import reasons_against_capture
from ....types import KVView, Rows, Workspace
from ..cache_dtype import FP8, as_numbers
from ..options import drafts_with
from .backend import SparseBackend, SparseBuilder, SparseLayer
from .decode_step import DecodeSteps
from .room import room_of
from .sparse import SparseRows
from .step import BuildParent, Step
from .worker import serving_of

logger = logging.getLogger("saccade")


class SaccadeFlashBuilder(SparseBuilder, FlashAttentionMetadataBuilder):
    """Prepares a step: one that a graph can hold if all rows have one new token and the policy allows it."""

    supports_update_block_table = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        reasons, longest, room = reasons_of(vllm_config), vllm_config.model_config.max_model_len, room_of(vllm_config)
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        most = max(vllm_config.scheduler_config.max_num_seqs, captured)
        fixed = not reasons and not self.verifies
        self.supports_draft_decode_metadata_update = fixed
        self._room = torch.zeros((2, most), dtype=torch.int32, device=device) if self.verifies else None
        self.sparse = SparseRows(
            vllm_config,
            self.view,
            room,
            longest=longest if fixed else None,
            rows=most,
            workspace=Workspace.of(most, self.num_heads_q, device) if fixed else None,
        )
        self._decode_steps = DecodeSteps(self.sparse, most, longest, device) if fixed else None
        if vllm_config.parallel_config.rank == 0 and not self.verifies:
            told = f"not part of CUDA graphs: {'; '.join(reasons)}" if reasons else f"part of CUDA graphs{room.told}"
            logger.info("saccade: %s are %s", "drafts" if drafts_with(vllm_config) else "decoding steps", told)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if serving_of(vllm_config).options.drafts and not drafts_with(vllm_config):
            # Whatever stands against graphs of drafts.
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.NEVER if reasons_of(vllm_config) else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def prepare(self, common: Any, build_parent: BuildParent) -> Step:
        # What this step writes may lie where the step before has read.
        self.sparse.sampling.measure_kept()
        if self._decode_steps is None or common.max_query_len > 1:
            return super().prepare(common, build_parent)
        return self._decode_steps.prepare(common, build_parent)

    def update_draft_decode_metadata(self, metadata: Step) -> None:
        """Bring a step up to rows that have grown on the device."""
        super().update_draft_decode_metadata(metadata.dense)


class SaccadeFlashAttention(SparseLayer, FlashAttentionImpl):
    """One layer; what it is asked with has all its digits, also where the cache is quantised.

    Not in a lossless engine, whose layers quantise queries as stock's do: in the compiled model, where they were never
    rounded to the model's dtype. The first that is made lets memory be set aside, which vLLM counts as the model's.
    """

    supports_quant_query_input: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        room_of(get_current_vllm_config())
        self._quantises = self.kv_cache_dtype in FP8 and self.supports_quant_query_input
        # vLLM's layer asks once, when it makes us, whether to quantise queries before it calls.
        self.supports_quant_query_input &= self.serving.options.drafts > 0

    def stock(self, layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """vLLM's own kernel, whose queries are as the cache is: quantised here, by the factor that it is told."""
        if self._quantises and query.dtype != torch.float8_e4m3fn:
            query, self.supports_quant_query_input = _quantised(query, layer._q_scale), True
        return super().stock(layer, query, *args, **kwargs)

    def view(self, layer: Any, kv_cache: Tensor, rows: Rows) -> KVView:
        """Of `[blocks, Hkv, block, 2 · d]` by strides: keys are the first d numbers of a token, values the rest."""
        k, v = as_numbers(kv_cache, self.kv_cache_dtype).transpose(1, 2).split(self.head_size, dim=-1)
        return KVView(k, v, rows, *self.scales(layer))


class SaccadeFlashBackend(SparseBackend, FlashAttentionBackend):
    """vLLM's FLASH_ATTN, decoding sparsely."""

    layer, builder = SaccadeFlashAttention, SaccadeFlashBuilder
    supports_kv_cache_update_bypass = False  # or vLLM 0.33 may call us without keys, which a model's kernel has written


def _quantised(query: Tensor, scale: Tensor) -> Tensor:
    """Queries `[T, Hq, d]` over their factor, one for all or one for each KV head, as vLLM's layer would do it."""
    numbers = query.flatten(1)
    shared = numbers.shape[1] // scale.numel() if scale.numel() > 1 else -1
    quantised: Tensor = scaled_fp8_quant(numbers, scale, group_shape=(-1, shared))[0]
    return quantised.view_as(query)


def reasons_of(vllm_config: Any) -> list[str]:
    """Why decoding steps cannot be captured; dense passes are steps of another kind, and recall is measured behind."""
    reason = room_of(vllm_config).reason
    return [*reasons_against_capture(serving_of(vllm_config).plan, None, ()), *([] if reason is None else [reason])]
