"""Drafts by the target itself: forward passes of one token a row under the policy; vLLM's next step verifies them."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer, init_attn_backend
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from ..options import drafting
from .worker import serving_of


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """The rows of a cycle's drafts, side by side.

    Attributes:
        slots: int32 `[n]`, where the model runner keeps each request; `slots_cpu` the same in numpy.
        bound: int32 `[n]` on the host, no less than a row's tokens in front of its drafts.
        tables: of each cache group int32 `[n, blocks]`.
    """

    slots: Tensor
    slots_cpu: Any
    bound: Tensor
    tables: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        return len(self.slots_cpu)


class SelfSpeculator(BaseSpeculator):
    """Proposes the likeliest tokens of the target under the policy, for every row whose prompt is through.

    A row's drafts begin behind its verified tokens. They write keys and values into slots that the verifying step
    writes again before any layer reads them, so nothing of a draft is left; bounds of pages are recomputed with them.
    """

    supports_mm_inputs = False
    draft_logits = None
    """Drafts are the likeliest tokens: a rejection sampler that knows it stays exact at any temperature."""
    pcp_manager: Any = None

    def __init__(self, vllm_config: Any, runner: Any) -> None:
        self._config, self._runner = vllm_config, runner
        rows, device = vllm_config.scheduler_config.max_num_seqs, runner.device
        self._inputs = InputBuffers(rows, rows, device)
        self._starts_cpu = torch.arange(rows + 1, dtype=torch.int32, device="cpu")
        self._starts = self._starts_cpu.to(device)
        self._proposed = torch.zeros(rows, vllm_config.num_speculative_tokens, dtype=torch.int64, device=device)
        self.attn_groups: list[list[Any]] = []

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Make the builders of drafts, once the target has its own; vLLM calls this again for another cache."""
        runner = self._runner
        self.attn_groups, *_ = init_attn_backend(runner.kv_cache_config, drafting(self._config), runner.device)

    def capture(self) -> None:
        """Nothing: drafts are run kernel by kernel."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        *rest: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **more: Any,
    ) -> Tensor:
        """Drafts int64 `[rows, k]` behind what a step has sampled; see vLLM's `BaseSpeculator`.

        A row in the middle of its prompt has none: what stands there the scheduler does not ask for.
        """
        drafts = self._proposed[: input_batch.num_reqs]
        if dummy_run:
            return drafts
        serving = serving_of(self._config)
        if serving.metrics is not None:
            serving.metrics.verified(str(serving.options.policy), input_batch.num_draft_tokens, num_rejected)
        # As the host knows it, without waiting: rows have sampled whose prompt ends in this step or before.
        reached = input_batch.num_computed_prefill_tokens_np + input_batch.num_scheduled_tokens
        chosen = [row for row, through in enumerate((reached >= input_batch.prefill_len_np).tolist()) if through]
        count = drafts.shape[1] if num_speculative_tokens is None else num_speculative_tokens
        if not chosen or not count:
            return drafts
        where = async_tensor_h2d(chosen, drafts.device, torch.int64)
        rows = self._rows(input_batch, chosen, where)
        tokens = last_sampled[rows.slots, 0]
        # The last token that was sampled has no keys yet.
        positions = self._runner.req_states.num_computed_tokens.gpu[rows.slots].long()
        for number in range(count):
            tokens = self._draft(rows, tokens, positions + number, number)
            drafts[where, number] = tokens
        return drafts

    def _rows(self, input_batch: Any, chosen: list[int], where: Tensor) -> DraftRows:
        runner, slots = self._runner, input_batch.idx_mapping[where]
        gather = runner.block_tables.gather_block_tables
        # vLLM 0.33 hides blocks that windows have left behind; what it is not told it cannot hide.
        told = {"num_computed_tokens": runner.req_states.num_computed_tokens.gpu}
        known = {name: value for name, value in told.items() if name in signature(gather).parameters}
        tables = gather(slots, num_reqs_padded=len(chosen), **known)
        bound = input_batch.seq_lens_cpu_upper_bound[chosen]
        return DraftRows(slots, input_batch.idx_mapping_np[chosen], bound, tables)

    def _draft(self, rows: DraftRows, tokens: Tensor, positions: Tensor, number: int) -> Tensor:
        """The likeliest next token of each row `[n]`: one forward pass over `tokens` at `positions`, both int64 `[n]`.

        Positions stop at the longest row: a draft there is thrown away, since no step verifies it.
        """
        runner, inputs, count, longest = self._runner, self._inputs, rows.count, self._config.model_config.max_model_len
        inputs.input_ids[:count] = tokens
        torch.clamp(positions, max=longest - 1, out=inputs.positions[:count])
        torch.add(inputs.positions[:count], 1, out=inputs.seq_lens[:count])
        starts, starts_cpu = self._starts[: count + 1], self._starts_cpu[: count + 1]
        slots = runner.block_tables.compute_slot_mappings(rows.slots, starts, inputs.positions[:count], count)
        metadata = build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=count,
            num_tokens=count,
            query_start_loc_gpu=starts,
            query_start_loc_cpu=starts_cpu,
            max_query_len=1,
            seq_lens=inputs.seq_lens,
            max_seq_len=longest,
            block_tables=rows.tables,
            slot_mappings=slots,
            kv_cache_config=runner.kv_cache_config,
            seq_lens_cpu_upper_bound=torch.clamp(rows.bound + number + 1, max=longest),
            positions=inputs.positions[:count],
            is_prefilling=torch.zeros(count, dtype=torch.bool, device="cpu"),
            req_idx=rows.slots_cpu,
        )
        by_layer = build_slot_mappings_by_layer(slots, runner.kv_cache_config)
        with set_forward_context(metadata, self._config, num_tokens=count, slot_mapping=by_layer):
            hidden = runner.model(
                input_ids=inputs.input_ids[:count],
                positions=inputs.positions[:count],
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        drafted: Tensor = runner.model.compute_logits(hidden).argmax(dim=-1)
        return drafted
