"""Every part of vLLM that this plugin relies on, checked before it is used: one clear line when something has moved.

A part is checked in the processes and at the moment where vLLM or we import its module anyway. A user who does not use
saccade sees a warning and vLLM as it comes; one who does sees the line, and no engine.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from ...errors import ServingError

VERSION = "0.32"


@dataclass(frozen=True, slots=True)
class Part:
    """One object of vLLM and what is expected of it.

    Attributes:
        module: dotted name.
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
        try:
            found: Any = import_module(self.module)
        except ImportError:
            return [f"there is no {self.module}"]
        path = self.module
        for name in self.name.split("."):
            if not hasattr(found, name):
                return [f"{path} has no {name}"]
            found, path = getattr(found, name), f"{path}.{name}"
        missing = [f"{path} has no {name}" for name in self.has.split() if not _has(found, name)]
        return missing + [f"{path} has no parameter {name}" for name in self.takes.split() if not _takes(found, name)]


_CONFIG = "vllm.config"
_SCHED = "vllm.v1.core.sched"
_FORWARD = "layer query key value kv_cache attn_metadata output"
_BUILD = "common_prefix_len common_attn_metadata fast_build"
_UPDATE = "layer key value kv_cache slot_mapping"

PARTS: dict[str, tuple[Part, ...]] = {
    "every process": (
        Part("vllm.platforms", "current_platform", has="is_cpu get_attn_backend_cls"),
        Part("vllm.platforms", "current_platform.get_attn_backend_cls", "selected_backend attn_selector_config"),
        Part("vllm.v1.attention.backends.registry", "AttentionBackendEnum", has="CUSTOM get_path is_overridden"),
        Part("vllm.v1.attention.backends.registry", "register_backend", "backend class_path"),
        Part("vllm.v1.attention.selector", "AttentionSelectorConfig", has="use_mla"),
        Part("vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry", has="check_kv_cache_spec_registry"),
        Part("vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry.register", "manager_class uniform_type_base_spec"),
        Part("vllm.v1.kv_cache_interface", "get_kv_cache_spec_kind"),
        Part("vllm.v1.kv_cache_interface", "replace_as"),
        Part(
            "vllm.v1.kv_cache_interface",
            "FullAttentionSpec",
            has="block_size num_kv_heads head_size dtype page_size_padded sliding_window attention_chunk_size "
            "non_causal tokens_per_state state_content_bytes num_head_slots unpadded_page_size_bytes page_size_bytes "
            "merge copy_with_new_block_size",
        ),
        Part("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager", "kv_cache_spec"),
        Part("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager.cache_blocks", "request num_tokens"),
        Part("vllm.exceptions", "VLLMValidationError"),
        Part("vllm.v1.sample.logits_processor.interface", "BatchUpdate", has="removed added moved"),
        Part("vllm.v1.sample.logits_processor.interface", "MoveDirectionality", has="SWAP"),
        Part(
            "vllm.v1.sample.logits_processor.interface",
            "LogitsProcessor",
            has="validate_params is_argmax_invariant apply update_state",
        ),
        Part("vllm.v1.worker.gpu.sample.logits_processor.interface", "LogitsProcessor", has="validate_params apply"),
        Part(
            "vllm.v1.worker.gpu.sample.logits_processor.interface",
            "LogitsProcessor.add_request",
            "req_idx sampling_params",
        ),
        Part(
            "vllm.v1.worker.gpu.sample.logits_processor.interface",
            "LogitsProcRequestState",
            has="prompt_len prefill_len",
        ),
        Part(
            _CONFIG,
            "VllmConfig",
            has="model_config cache_config parallel_config scheduler_config attention_config speculative_config "
            "kv_transfer_config additional_config use_v2_model_runner",
        ),
        Part(
            _CONFIG,
            "ModelConfig",
            has="model max_model_len hf_text_config runner_type use_mla is_encoder_decoder has_inner_state is_hybrid "
            "get_sliding_window get_head_size get_total_num_kv_heads",
        ),
        Part(_CONFIG, "CacheConfig", has="block_size cache_dtype kv_cache_memory_bytes"),
        Part(
            _CONFIG,
            "ParallelConfig",
            has="rank tensor_parallel_size pipeline_parallel_size decode_context_parallel_size "
            "prefill_context_parallel_size enable_dbo",
        ),
        Part(
            _CONFIG,
            "SchedulerConfig",
            has="async_scheduling max_num_batched_tokens max_num_scheduled_tokens long_prefill_token_threshold "
            "get_scheduler_cls",
        ),
        Part(_CONFIG, "AttentionConfig", has="backend backend_per_kind"),
    ),
    "worker": (
        Part(_CONFIG, "get_current_vllm_config"),
        Part("vllm.forward_context", "get_forward_context"),
        Part("vllm.forward_context", "ForwardContext", has="attn_metadata"),
        Part("vllm.model_executor.models.utils", "extract_layer_index", "layer_name"),
        Part("vllm.distributed", "tensor_model_parallel_all_gather", "dim"),
        Part("vllm.tokenizers", "cached_tokenizer_from_config", "model_config"),
        Part("vllm.utils.torch_utils", "async_tensor_h2d", "data device dtype"),
        Part(
            "vllm.v1.attention.backend",
            "AttentionBackend",
            has="get_name get_impl_cls get_builder_cls get_supported_kernel_block_sizes customize_spec",
        ),
        Part(
            "vllm.v1.attention.backend",
            "CommonAttentionMetadata",
            has="query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_reqs num_actual_tokens "
            "max_query_len max_seq_len block_table_tensor slot_mapping is_prefilling req_idx positions "
            "logits_indices_padded num_logits_indices _num_computed_tokens_cache _token_to_req_indices_cache replace",
        ),
    ),
    "worker on CPUs": (
        Part("vllm.v1.attention.backend", "MultipleOf"),
        Part("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend"),
        Part("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl.forward", _FORWARD),
        Part("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl.do_kv_cache_update", _UPDATE),
        Part("vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadataBuilder.build", _BUILD),
        Part(
            "vllm.v1.attention.backends.cpu_attn",
            "CPUAttentionMetadataBuilder",
            has="isa layer_names _set_isa_to_layers",
        ),
    ),
    "worker on CUDA": (
        Part("vllm", "envs", has="VLLM_USE_BREAKABLE_CUDAGRAPH"),
        Part(_CONFIG, "CUDAGraphMode", has="NONE"),
        Part(_CONFIG, "CompilationConfig", has="cudagraph_mode splitting_ops_contain_kv_cache_update"),
        Part(_CONFIG, "get_layers_from_vllm_config", "vllm_config layer_type layer_names"),
        Part("vllm.model_executor.layers.attention", "Attention", has="impl"),
        Part("vllm.utils.torch_utils", "canonicalize_singleton_dim_strides"),
        Part("vllm.v1.attention.backend", "AttentionCGSupport", has="NEVER"),
        Part(
            "vllm.v1.attention.backends.flash_attn",
            "FlashAttentionImpl",
            has="vllm_flash_attn_version batch_invariant_enabled fa4_hd256",
        ),
        Part("vllm.v1.attention.backends.flash_attn", "FlashAttentionBackend"),
        Part("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl.forward", _FORWARD),
        Part("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl.do_kv_cache_update", _UPDATE),
        Part("vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadataBuilder.build", _BUILD),
    ),
    "scheduler": (
        Part(f"{_SCHED}.scheduler", "Scheduler", "vllm_config kv_cache_config"),
        Part(
            f"{_SCHED}.scheduler",
            "Scheduler",
            has="schedule running requests max_num_scheduled_tokens scheduler_config current_step kv_cache_manager "
            "use_v2_model_runner model_uses_mrope",
        ),
        Part(f"{_SCHED}.scheduler", "Scheduler._update_after_schedule", "scheduler_output"),
        Part(f"{_SCHED}.scheduler", "Scheduler._preempt_request", "request"),
        Part(f"{_SCHED}.scheduler", "Scheduler._update_request_as_session", "session update"),
        Part(
            f"{_SCHED}.output",
            "SchedulerOutput",
            has="scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens",
        ),
        Part(f"{_SCHED}.output", "NewRequestData.from_request", "request block_ids prefill_token_ids uses_mrope"),
        Part(
            f"{_SCHED}.output",
            "CachedRequestData",
            has="req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids num_computed_tokens "
            "num_output_tokens",
        ),
        Part("vllm.v1.core.kv_cache_manager", "KVCacheManager.cache_blocks", "request num_computed_tokens"),
        Part("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_block_ids", "request_id"),
        Part(
            "vllm.v1.request",
            "Request",
            has="request_id status sampling_params all_token_ids num_tokens num_prompt_tokens num_computed_tokens "
            "next_decode_eligible_step",
        ),
        Part("vllm.v1.request", "RequestStatus", has="RUNNING"),
    ),
    "server": (
        Part("vllm", "envs", has="VLLM_CPU_KVCACHE_SPACE"),
        Part("vllm.utils.argparse_utils", "FlexibleArgumentParser"),
        Part("vllm.entrypoints.launchers.cli_args", "make_arg_parser", "parser"),
        Part("vllm.entrypoints.launchers.cli_args", "validate_parsed_serve_args", "args"),
        Part("vllm.entrypoints.launchers.api_server.entry", "run_server", "args"),
        Part("vllm.entrypoints.serve.utils.api_utils", "cli_env_setup"),
        Part("vllm.engine.arg_utils", "AsyncEngineArgs.from_cli_args", "args"),
        Part("vllm.engine.arg_utils", "AsyncEngineArgs.create_engine_config", "usage_context"),
        Part("vllm.usage.usage_lib", "UsageContext", has="OPENAI_API_SERVER"),
    ),
    "benchmark": (
        Part("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend.get_supported_head_sizes"),
        Part("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa", "dtype block_size head_size"),
        Part("vllm._custom_ops", "cpu_attn_reshape_and_cache", "key value key_cache value_cache slot_mapping isa"),
        Part("vllm._custom_ops", "cpu_attn_get_scheduler_metadata", "num_reqs seq_lens isa enable_kv_split"),
        Part("vllm._custom_ops", "cpu_attention_with_kv_cache", "query key_cache value_cache block_table"),
    ),
}
"""By where they are used; the keys are what `check_interfaces` takes."""


def check_interfaces(*places: str) -> None:
    """Raise unless this is the vLLM that the plugin was written for, as far as some places use it.

    Raises:
        ServingError: naming what has moved.
    """
    found = problem(*places)
    if found is not None:
        raise ServingError(found)


@cache
def problem(*places: str) -> str | None:
    """What `check_interfaces` would say; None: all is where it was."""
    import vllm

    version = vllm.__version__
    moved = [sentence for place in places for part in PARTS[place] for sentence in part.moved()]
    if not moved and f"{version}.".startswith(f"{VERSION}."):
        return None
    rest = f", and {len(moved) - 3} more" if len(moved) > 3 else ""
    told = f"here ({version}) {', '.join(moved[:3])}{rest}" if moved else f"this is vLLM {version}"
    return f"this saccade was written for vLLM {VERSION}; {told}"


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
        if name in vars(base).get("__annotations__", {}):
            return True
        # The names of attributes that these use: enough to notice that one of them is gone.
        makers: list[Any] = [vars(base).get(maker) for maker in ("__init__", "__post_init__")]
        if any(name in maker.__code__.co_names for maker in makers if hasattr(maker, "__code__")):
            return True
    return False
