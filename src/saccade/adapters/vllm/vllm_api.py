"""Every part of vLLM that this plugin relies on, checked before it is used: one clear line when something has moved.

A part is checked in the processes and at the moment where vLLM or we import its module anyway. A user who does not use
saccade sees a warning and vLLM as it comes; one who does sees the line, and no engine.
"""

import inspect
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from ...errors import ServingError

VERSIONS = ("0.32", "0.33")
"""Which the plugin was written for, oldest first; nothing below asks which of them this is."""
TOLD = " and ".join(VERSIONS)


@dataclass(frozen=True, slots=True)
class Part:
    """One object of vLLM and what is expected of it.

    Attributes:
        module: where it lies; or two places with `|` between them, of which the first that imports is taken.
        name: in the module, dotted below a class.
        takes: names of parameters, separated by blanks.
        has: names of attributes, fields and methods, separated by blanks; of a class also what its instances are given
            when they are made.
    """

    module: str
    name: str
    takes: str = ""
    has: str = ""

    def moved(self) -> list[str]:
        """What is not as expected, one sentence each."""
        found = self.holder()
        if found is None:
            return [f"there is no {self.module.replace('|', ' nor ')}"]
        path = found.__name__
        for name in self.name.split("."):
            if not hasattr(found, name):
                return [f"{path} has no {name}"]
            found, path = getattr(found, name), f"{path}.{name}"
        missing = [f"{path} has no {name}" for name in self.has.split() if not _has(found, name)]
        return missing + [f"{path} has no parameter {name}" for name in self.takes.split() if not _takes(found, name)]

    def holder(self) -> Any:
        """The module that it lies in; None: there is none."""
        for module in self.module.split("|"):
            with suppress(ImportError):
                return import_module(module)
        return None


def _parts(text: str) -> tuple[Part, ...]:
    """One a line, `module Name(parameters): attributes`; a long one goes on in the next, further to the right."""
    text = re.sub(r"\n {12}", " ", text)
    found = re.findall(r"^ *(\S+) ([\w.]+)(?:\((.+)\))?(?:: (.+))?$", text, re.MULTILINE)
    assert len(found) == len(text.strip().splitlines()), "every line is a part"
    return tuple(Part(*fields) for fields in found)


PARTS: dict[str, tuple[Part, ...]] = {
    "every process": _parts("""
        vllm.platforms current_platform: is_cpu get_attn_backend_cls
        vllm.platforms current_platform.check_and_update_config(vllm_config)
        vllm.platforms current_platform.get_attn_backend_cls(selected_backend attn_selector_config)
        vllm.v1.attention.backends.registry AttentionBackendEnum: CUSTOM get_path is_overridden
        vllm.v1.attention.backends.registry register_backend(backend class_path)
        vllm.v1.attention.selector AttentionSelectorConfig: use_mla
        vllm.v1.kv_cache_spec_registry KVCacheSpecRegistry: check_kv_cache_spec_registry
        vllm.v1.kv_cache_spec_registry KVCacheSpecRegistry.register(manager_class uniform_type_base_spec)
        vllm.v1.kv_cache_interface get_kv_cache_spec_kind
        vllm.v1.kv_cache_interface replace_as
        vllm.v1.kv_cache_interface SlidingWindowSpec: sliding_window extra_retained_tokens
        vllm.v1.kv_cache_interface FullAttentionSpec: block_size num_kv_heads head_size dtype page_size_padded
            sliding_window attention_chunk_size non_causal tokens_per_state state_content_bytes num_head_slots
            unpadded_page_size_bytes page_size_bytes head_size_v merge copy_with_new_block_size
        vllm.v1.core.single_type_kv_cache_manager FullAttentionManager(kv_cache_spec)
        vllm.v1.core.single_type_kv_cache_manager FullAttentionManager.cache_blocks(request num_tokens)
        vllm.v1.core.single_type_kv_cache_manager FullAttentionManager: block_pool
        vllm.v1.core.block_pool BlockPool: hash_block_size
        vllm.v1.request Request: block_hashes _block_hasher
        vllm.exceptions VLLMValidationError
        vllm.v1.sample.logits_processor.interface BatchUpdate: removed added moved
        vllm.v1.sample.logits_processor.interface MoveDirectionality: SWAP
        vllm.v1.sample.logits_processor.interface LogitsProcessor: validate_params is_argmax_invariant apply
            update_state
        vllm.v1.worker.gpu.sample.logits_processor.interface LogitsProcessor: validate_params apply
        vllm.v1.worker.gpu.sample.logits_processor.interface LogitsProcessor.add_request(req_idx sampling_params)
        vllm.v1.worker.gpu.sample.logits_processor.interface LogitsProcRequestState: prompt_len prefill_len
        vllm.config VllmConfig: model_config cache_config parallel_config scheduler_config attention_config
            speculative_config kv_transfer_config additional_config use_v2_model_runner compilation_config lora_config
            watermark_config
        vllm.config SpeculativeConfig: method model num_speculative_tokens draft_sample_method rejection_sample_method
            num_speculative_tokens_per_batch_size
        vllm.config ModelConfig: model max_model_len hf_text_config runner_type use_mla is_encoder_decoder
            is_multimodal_model enable_prompt_embeds head_dtype get_vocab_size uses_mrope has_inner_state is_hybrid
            get_head_size get_total_num_kv_heads
        vllm.config CacheConfig: block_size cache_dtype kv_cache_dtype_skip_layers kv_cache_memory_bytes
            enable_prefix_caching
        vllm.config ParallelConfig: rank tensor_parallel_size pipeline_parallel_size decode_context_parallel_size
            prefill_context_parallel_size use_ubatching worker_cls data_parallel_size enable_eplb
        vllm.config SchedulerConfig: async_scheduling max_num_batched_tokens max_num_scheduled_tokens
            long_prefill_token_threshold get_scheduler_cls max_num_seqs
        vllm.config CompilationConfig: max_cudagraph_capture_size cudagraph_capture_sizes
        vllm.config AttentionConfig: backend backend_per_kind
        vllm.config KVTransferConfig: kv_connector kv_connector_module_path kv_connector_extra_config
    """),
    "offloading": _parts("""
        vllm.v1.kv_offload.base OffloadingSpec: offload_prompt_only
        vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler RequestOffloadState: storable_chunks
    """),
    "worker": _parts("""
        vllm.config get_layers_from_vllm_config(vllm_config layer_type layer_names)
        vllm.model_executor.layers.attention Attention: impl
        vllm.config get_current_vllm_config
        vllm.model_executor.models.utils extract_layer_index(layer_name)
        vllm.distributed tensor_model_parallel_all_gather(dim)
        vllm.tokenizers cached_tokenizer_from_config(model_config)
        vllm.utils.torch_utils async_tensor_h2d(data device dtype)
        vllm.v1.attention.backend AttentionLayer: _q_scale _k_scale _v_scale
        vllm.v1.attention.backend AttentionBackend: get_name get_impl_cls get_builder_cls
            get_supported_kernel_block_sizes customize_spec
        vllm.v1.attention.backend AttentionBackend.validate_configuration(kv_cache_dtype)
        vllm.v1.attention.backend CommonAttentionMetadata: query_start_loc query_start_loc_cpu seq_lens
            seq_lens_cpu_upper_bound num_reqs num_actual_tokens max_query_len max_seq_len block_table_tensor
            slot_mapping is_prefilling req_idx positions logits_indices_padded num_logits_indices
            _num_computed_tokens_cache _token_to_req_indices_cache replace
    """),
    "worker on CPUs": _parts("""
        vllm.v1.attention.backend MultipleOf
        vllm.v1.attention.backends.cpu_attn CPUAttentionBackend
        vllm.v1.attention.backends.cpu_attn CPUAttentionBackendImpl.forward(layer query key value kv_cache attn_metadata
            output)
        vllm.v1.attention.backends.cpu_attn CPUAttentionMetadataBuilder.build(common_prefix_len common_attn_metadata
            fast_build)
        vllm.v1.attention.backends.cpu_attn CPUAttentionMetadataBuilder: isa layer_names _set_isa_to_layers
    """),
    "worker on CUDA": _parts("""
        vllm.v1.worker.gpu.states RequestState.add_request(req_id all_token_ids num_computed_tokens)
        vllm.v1.worker.gpu.states RequestState.remove_request(req_id)
        vllm.config ModelConfig: enable_sleep_mode
        vllm.platforms current_platform: get_device_total_memory
        vllm.utils.torch_utils kv_cache_dtype_str_to_dtype(kv_cache_dtype model_config)
        vllm.v1.attention.backend AttentionCGSupport: NEVER UNIFORM_SINGLE_TOKEN_DECODE
        vllm.v1.attention.backends.flash_attn FlashAttentionBackend
        vllm.v1.attention.backends.flash_attn FlashAttentionImpl.forward(layer query key value kv_cache attn_metadata
            output)
        vllm.v1.attention.backends.flash_attn FlashAttentionImpl: supports_quant_query_input kv_cache_dtype
        vllm._custom_ops scaled_fp8_quant(input scale group_shape)
        vllm.v1.attention.backends.flash_attn FlashAttentionMetadataBuilder.build(common_prefix_len common_attn_metadata
            fast_build)
    """),
    "lossless": _parts("""
        vllm.config.compilation CUDAGraphMode: FULL FULL_DECODE_ONLY NONE decode_mode
        vllm.forward_context set_forward_context(attn_metadata vllm_config num_tokens slot_mapping)
        vllm.v1.attention.backend AttentionCGSupport: UNIFORM_BATCH
        vllm.v1.attention.backend AttentionMetadataBuilder: supports_draft_decode_metadata_update
        vllm.v1.worker.utils AttentionGroup: supports_draft_decode_metadata_update update_draft_decode_metadata
        vllm.v1.worker.gpu.cudagraph_utils CudaGraphManager(decode_query_len): capture dispatch run_fullgraph
        vllm.v1.worker.gpu.block_table BlockTables: get_dummy_block_tables slot_mappings
        vllm.v1.worker.gpu_worker Worker: init_device compile_or_warm_up_model
        vllm.v1.worker.gpu.attn_utils build_attn_metadata(attn_groups num_reqs num_tokens query_start_loc_gpu
            query_start_loc_cpu max_query_len seq_lens max_seq_len block_tables slot_mappings kv_cache_config positions
            seq_lens_cpu_upper_bound is_prefilling req_idx)
        vllm.v1.worker.gpu.attn_utils build_slot_mappings_by_layer(slot_mappings kv_cache_config)
        vllm.v1.worker.gpu.attn_utils init_attn_backend(kv_cache_config vllm_config device)
        vllm.v1.worker.gpu.block_table BlockTables.gather_block_tables(idx_mapping num_reqs_padded)
        vllm.v1.worker.gpu.block_table BlockTables.compute_slot_mappings(idx_mapping query_start_loc positions)
        vllm.v1.worker.gpu.input_batch InputBuffers(max_num_reqs max_num_tokens device): input_ids positions seq_lens
            is_padding query_start_loc
        vllm.v1.worker.gpu.input_batch InputBatch: num_reqs idx_mapping idx_mapping_np num_scheduled_tokens
            num_draft_tokens num_computed_prefill_tokens_np prefill_len_np seq_lens_cpu_upper_bound cu_num_logits
        vllm.v1.worker.gpu.model_runner GPUModelRunner: device speculator req_states
        vllm.v1.worker.gpu.states RequestState: num_computed_tokens
        vllm.v1.worker.gpu.spec_decode.speculator BaseSpeculator: init_cudagraph_manager capture
        vllm.v1.worker.gpu.spec_decode.speculator BaseSpeculator.propose(input_batch attn_metadata slot_mappings
            last_hidden_states aux_hidden_states num_sampled num_rejected last_sampled dummy_run num_speculative_tokens
            next_prefill_tokens temperature seeds)
        vllm.v1.worker.gpu.sample.gumbel gumbel_sample(logits expanded_idx_mapping temperature seed pos is_drafting
            apply_temperature logits_cache logits_cache_col)
    """),
    "lossless on CPUs": _parts("""
        vllm.v1.worker.cpu_worker CPUWorker: init_device
    """),
    "scheduler": _parts("""
        vllm.v1.core.sched.scheduler Scheduler(vllm_config kv_cache_config): schedule running requests
            max_num_scheduled_tokens scheduler_config current_step kv_cache_manager use_v2_model_runner model_uses_mrope
            max_model_len
        vllm.v1.core.sched.async_scheduler AsyncScheduler._update_after_schedule(scheduler_output)
        vllm.v1.core.sched.scheduler Scheduler._update_after_schedule(scheduler_output)
        vllm.v1.core.sched.scheduler Scheduler.add_request(request)
        vllm.v1.core.sched.scheduler Scheduler._preempt_request(request)
        vllm.v1.core.sched.scheduler Scheduler._update_request_as_session(session update)
        vllm.v1.core.sched.scheduler Scheduler.update_from_output(scheduler_output model_runner_output)
        vllm.v1.core.sched.output SchedulerOutput: scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens
            scheduled_spec_decode_tokens num_spec_tokens_to_schedule
        vllm.v1.outputs ModelRunnerOutput: sampled_token_ids req_id_to_index
        vllm.v1.core.sched.output NewRequestData.from_request(request block_ids prefill_token_ids uses_mrope)
        vllm.v1.core.sched.output CachedRequestData: req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids
            num_computed_tokens num_output_tokens
        vllm.v1.core.kv_cache_manager KVCacheManager.cache_blocks(request num_computed_tokens)
        vllm.v1.core.kv_cache_manager KVCacheManager.get_block_ids(request_id)
        vllm.v1.kv_cache_interface SlidingWindowSpec: max_admission_blocks_per_request extra_retained_tokens
        vllm.v1.kv_cache_interface KVCacheConfig: num_blocks kv_cache_groups
        vllm.config VllmConfig: max_in_flight_tokens
        vllm.v1.request Request: request_id status sampling_params all_token_ids num_tokens num_prompt_tokens
            num_computed_tokens next_decode_eligible_step num_output_placeholders max_tokens
        vllm.v1.request RequestStatus: RUNNING
    """),
    "server": _parts("""
        vllm envs: VLLM_CPU_KVCACHE_SPACE
        vllm.config ModelConfig: skip_tokenizer_init dtype
        vllm.tokenizers cached_tokenizer_from_config(model_config)
        vllm.utils.argparse_utils FlexibleArgumentParser
        vllm.entrypoints.common.cli_args|vllm.entrypoints.launchers.cli_args make_arg_parser(parser)
        vllm.entrypoints.common.cli_args|vllm.entrypoints.launchers.cli_args validate_parsed_serve_args(args)
        vllm.entrypoints.launchers.api_server.entry run_server(args)
        vllm.tool_parsers ToolParserManager.get_tool_parser(name)
        vllm.entrypoints.common.startup|vllm.entrypoints.serve.utils.api_utils cli_env_setup
        vllm.engine.arg_utils AsyncEngineArgs.from_cli_args(args)
        vllm.engine.arg_utils AsyncEngineArgs.create_engine_config(usage_context)
        vllm.usage.usage_lib UsageContext: OPENAI_API_SERVER
    """),
}
"""By where they are used; the keys are what `check_interfaces` takes."""


def check_interfaces(*places: str) -> None:
    """Raise a ServingError, which names what has moved, unless vLLM is as some places use it."""
    found = problem(*places)
    if found is not None:
        raise ServingError(found)


@cache
def problem(*places: str) -> str | None:
    """What `check_interfaces` would say; None: all is where it was."""
    import vllm

    version = vllm.__version__
    moved = [sentence for place in places for part in PARTS[place] for sentence in part.moved()]
    if not moved and written_for(version):
        return None
    rest = f", and {len(moved) - 3} more" if len(moved) > 3 else ""
    told = f"here ({version}) {', '.join(moved[:3])}{rest}" if moved else f"this is vLLM {version}"
    return f"this saccade was written for vLLM {TOLD}; {told}"


def written_for(version: str) -> bool:
    """Whether a version of vLLM, with whatever stands behind it, is of `VERSIONS`."""
    return f"{version}.".startswith(tuple(f"{known}." for known in VERSIONS))


def lent(place: str, *names: str) -> list[Any]:
    """Some of `PARTS[place]`, wherever they lie in this version; `check_interfaces` has found them there."""
    parts = {part.name: part for part in PARTS[place]}
    return [getattr(parts[name].holder(), name) for name in names]


def borrowed(module: str, name: str, stand_in: Any) -> Any:
    """Something of vLLM's, or a stand-in: vLLM imports our logits processor whether it is used or not."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return stand_in


def _takes(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _has(owner: Any, name: str) -> bool:
    """Whether an object has an attribute, or the instances of a class have it once they are made."""
    if hasattr(owner, name):
        return True
    for base in owner.__mro__ if isinstance(owner, type) else ():
        if name in getattr(base, "__annotations__", {}):  # its own; Python 3.14 keeps none in `vars`
            return True
        # The names of attributes that these use: enough to notice that one of them is gone.
        makers: list[Any] = [vars(base).get(maker) for maker in ("__init__", "__post_init__")]
        if any(name in maker.__code__.co_names for maker in makers if hasattr(maker, "__code__")):
            return True
    return False
