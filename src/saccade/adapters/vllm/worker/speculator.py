"""Drafts by the target itself: forward passes of one token a row under the policy; vLLM's next step verifies them."""

import logging
from collections.abc import Callable
from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer, init_attn_backend
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from ..options import drafting
from .worker import serving_of

logger = logging.getLogger("vllm.saccade")


class SelfSpeculator(BaseSpeculator):
    """Proposes tokens of the target under the policy, for every row whose prompt is through: its likeliest ones, or,
    of a row that samples, some drawn at its temperature, if drafts are probabilistic.

    A row's drafts begin behind its verified tokens. They write keys and values into slots that the verifying step
    writes again before any layer reads them, so nothing of a draft is left; bounds of pages are recomputed with them.

    All that a draft reads lies in the same memory, and each makes that ready for the next: where the attention's
    metadata can be renewed on the device, a draft is a CUDA graph, which is replayed.
    """

    supports_mm_inputs = False
    draft_logits: Tensor | None
    """What drafts were drawn from, `[requests, k, vocabulary]`, as the rejection sampler has to know; None: they are
    the likeliest tokens, with which it stays exact at any temperature."""
    pcp_manager: Any = None

    def __init__(self, vllm_config: Any, runner: Any) -> None:
        self._config, self._runner, self._longest = vllm_config, runner, vllm_config.model_config.max_model_len
        rows, device = vllm_config.scheduler_config.max_num_seqs, runner.device
        self._inputs = InputBuffers(rows, rows, device)
        self._numbers_cpu = torch.arange(rows + 1, dtype=torch.int32, device="cpu")
        self._numbers = self._numbers_cpu.to(device)
        self._slots = torch.zeros(rows, dtype=torch.int64, device=device)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._drafted = torch.zeros(rows, vllm_config.num_speculative_tokens, dtype=torch.int64, device=device)
        self._proposed = torch.zeros_like(self._drafted)
        self._places = torch.arange(self._drafted.shape[1], device=device)
        self._temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self._seeds, self.draft_logits = torch.zeros(rows, dtype=torch.int64, device=device), None
        if vllm_config.speculative_config.draft_sample_method == "probabilistic":
            model, drafts = vllm_config.model_config, vllm_config.num_speculative_tokens
            sizes = rows, drafts, model.get_vocab_size()
            self.draft_logits = torch.zeros(sizes, dtype=model.head_dtype, device=device)
        # vLLM 0.33 hides blocks that windows have left behind; what it is not told it cannot hide.
        self._tells_computed = "num_computed_tokens" in signature(BlockTables.gather_block_tables).parameters
        self.attn_groups: list[list[Any]] = []
        self._renews = False
        self._graphs: Any = None

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Make the builders of drafts, once the target has its own; vLLM calls this again for another cache."""
        runner, told, rows = self._runner, copy(self._config), self._config.scheduler_config.max_num_seqs
        self.attn_groups, *_ = init_attn_backend(runner.kv_cache_config, drafting(self._config), runner.device)
        self._renews = all(one.supports_draft_decode_metadata_update for group in self.attn_groups for one in group)
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        if full and not self._renews:
            logger.warning("saccade: drafts are run kernel by kernel: not all attention backends renew their metadata")
        # The target's sizes are those of its tokens, several a row: the most rows need not be among them.
        told.compilation_config = sizes = copy(told.compilation_config)
        sizes.cudagraph_capture_sizes = [*(size for size in sizes.cudagraph_capture_sizes or () if size < rows), rows]
        most = sizes.max_cudagraph_capture_size
        if full and most is not None and most < rows:
            logger.warning(
                "saccade: drafts of more than %d rows are run kernel by kernel: no graphs are that large", most
            )
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full and self._renews else CUDAGraphMode.NONE
        self._graphs = CudaGraphManager(told, runner.device, mode, decode_query_len=1)

    def capture(self) -> None:
        """Make a graph of one draft for every size of a batch."""
        self._graphs.capture(self._to_capture, "Capturing CUDA graphs of drafts")

    def _to_capture(self, desc: Any, warmup: bool) -> Callable[[CUDAGraphMode], None]:
        """A draft of rows of one token that are nobody's and write nowhere."""
        count, inputs = desc.num_reqs, self._inputs
        for memory, value in ((self._slots, -1), (inputs.input_ids, 0), (inputs.positions, 0)):
            memory.fill_(value)
        self._begin(count)
        tables = self._runner.block_tables.get_dummy_block_tables(count)
        metadata = self._metadata(count, tables, self._numbers_cpu[1 : count + 1], None)
        return lambda _: self._draft(count, metadata)

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
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
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
        if serving.metrics is not None and input_batch.num_draft_tokens:
            given = input_batch.cu_num_logits[: input_batch.num_reqs + 1].diff() - 1
            stood = (torch.stack((given, given - num_rejected))[..., None] > self._places).sum(1)
            serving.metrics.verified(str(serving.options.policy), stood)
        # As the host knows it, without waiting: rows have sampled whose prompt ends in this step or before.
        reached = input_batch.num_computed_prefill_tokens_np + input_batch.num_scheduled_tokens
        chosen = [row for row, through in enumerate((reached >= input_batch.prefill_len_np).tolist()) if through]
        count = drafts.shape[1] if num_speculative_tokens is None else num_speculative_tokens
        if not chosen or not count:
            return drafts
        desc = self._graphs.dispatch(len(chosen), len(chosen), 1, 0)
        padded, replayed = desc.num_reqs, desc.cg_mode == CUDAGraphMode.FULL
        where = async_tensor_h2d(chosen, drafts.device, torch.int64)
        tables = self._enter(input_batch.idx_mapping[where], last_sampled, padded)
        self._temperature.copy_(temperature)
        self._seeds.copy_(seeds)
        bound, slots = input_batch.seq_lens_cpu_upper_bound[chosen], input_batch.idx_mapping_np[chosen]
        for number in range(count):
            if not replayed or number == 0:
                metadata = self._metadata(padded, tables, bound + number + 1, slots)
            elif serving.metrics is not None:
                serving.metrics.again()
            self._graphs.run_fullgraph(desc) if replayed else self._draft(padded, metadata)
        drafts[where] = self._drafted[: len(chosen)]
        return drafts

    def _enter(self, chosen: Tensor, last_sampled: Tensor, padded: int) -> Any:
        """Let all that a draft reads say that the first comes, of the requests in some slots; gives their blocks."""
        runner, inputs, count = self._runner, self._inputs, len(chosen)
        slots, computed = self._slots[:count].copy_(chosen), runner.req_states.num_computed_tokens.gpu
        # Rows that pad the batch are nobody's, whose logits would be kept.
        self._slots[count:] = -1
        # The last token that was sampled has no keys yet.
        inputs.input_ids[:count], inputs.positions[:count] = last_sampled[slots, 0], computed[slots]
        self._begin(count)
        told = {"num_computed_tokens": computed} if self._tells_computed else {}
        return runner.block_tables.gather_block_tables(slots, num_reqs_padded=padded, **told)

    def _begin(self, count: int) -> None:
        """Let the first draft of the first rows come next; all others pad the batch."""
        self._number.zero_()
        torch.ge(self._numbers[:-1], count, out=self._inputs.is_padding)
        torch.clamp(self._numbers, max=count, out=self._inputs.query_start_loc)
        self._reach()

    def _reach(self) -> None:
        """Let rows end behind their token, at the longest row: a draft there is thrown away, no step verifies it."""
        inputs = self._inputs
        inputs.positions.clamp_(max=self._longest - 1)
        torch.add(inputs.positions, 1, out=inputs.seq_lens).masked_fill_(inputs.is_padding, 0)

    def _metadata(self, count: int, tables: tuple[Tensor, ...], bound: Tensor, slots: Any) -> Any:
        """Of a draft of `count` rows, by layer: in vLLM's memory and in ours, where a graph finds it.

        `bound`: no less than the tokens of each row, on the host; rows behind them pad the batch. `slots`: in numpy,
        where the model runner keeps each request; None: they are nobody's.
        """
        runner, inputs = self._runner, self._inputs
        return build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=count,
            num_tokens=count,
            query_start_loc_gpu=inputs.query_start_loc[: count + 1],
            query_start_loc_cpu=self._numbers_cpu[: count + 1].clamp(max=len(bound)),
            max_query_len=1,
            seq_lens=inputs.seq_lens,
            max_seq_len=self._longest,
            block_tables=tables,
            slot_mappings=runner.block_tables.slot_mappings[:, :count],
            kv_cache_config=runner.kv_cache_config,
            seq_lens_cpu_upper_bound=bound.clamp(max=self._longest),
            positions=inputs.positions[:count],
            is_prefilling=torch.zeros(count, dtype=torch.bool, device="cpu"),
            req_idx=slots,
        )

    def _draft(self, count: int, metadata: Any) -> None:
        """One forward pass over a token of each row: the next ones are kept, and are the input of the next pass.

        All on the device, so that a graph can hold it; `count` rows, padding included.
        """
        runner, inputs = self._runner, self._inputs
        edges, positions = inputs.query_start_loc[: count + 1], inputs.positions[:count]
        slots = runner.block_tables.compute_slot_mappings(self._slots[:count], edges, positions, count)
        for group in (group for groups in self.attn_groups for group in groups if self._renews):
            group.update_draft_decode_metadata(metadata)
        by_layer = build_slot_mappings_by_layer(slots, runner.kv_cache_config)
        with set_forward_context(metadata, self._config, num_tokens=count, slot_mapping=by_layer):
            hidden = runner.model(
                input_ids=inputs.input_ids[:count],
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        logits = runner.model.compute_logits(hidden)
        if self.draft_logits is None:
            tokens = logits.argmax(dim=-1)
        else:
            tokens = gumbel_sample(
                logits,
                self._slots[:count],
                self._temperature,
                self._seeds,
                positions,
                apply_temperature=True,
                is_drafting=True,
                logits_cache=self.draft_logits,
                logits_cache_col=self._number[0],
            )
        self._drafted[:count].index_copy_(1, self._number, tokens[:, None])
        self._number += 1
        inputs.input_ids[:count] = tokens
        inputs.positions += 1
        self._reach()
