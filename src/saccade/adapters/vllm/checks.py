"""Which engines can decode under a policy; everything else is refused with the reason, before any work."""

from dataclasses import replace
from math import lcm
from typing import Any

import torch

from ...checkpoints.shape import shape_of as shape_of_text
from ...checkpoints.unsupported import LATENT, mixed_kinds, reasons_in, reasons_in_kinds, reasons_in_sizes, values_in
from ...errors import PolicyError, ServingError
from ...methods.policy import Policy
from ...plans.plan import Plan
from ...plans.rectify import Rectify
from ...recipes.kept import lacks_layer
from ...selection.scorers.page_bounds import PageBounds
from ...types import CHUNKED, FULL, SLIDING, KVView, Rows
from .cache_dtype import FP8, VALID, bounds_bytes, number_type, reasons_against_dtype
from .lossless import unmet_by_drafts
from .options import CYCLES, ServeOptions, shape_of
from .vllm_api import check_interfaces, problem

SCHEDULER = "saccade.adapters.vllm.scheduler.RectifyingScheduler"
"""What `--scheduler-cls` is given."""

FULL_KIND, WINDOW_KIND = "full_attention", "sliding_window"
"""vLLM's words for kinds of layers."""

PER_KIND = f"""--attention-config '{{"backend_per_kind": {{"{FULL_KIND}": "CUSTOM"}}}}'"""
"""What leaves layers with a window to vLLM."""

OFFLOADING, PROMPTS = "OffloadingConnector", "offload_prompt_only"
"""vLLM's names of its KV connector to the host's memory, and of what keeps answers from it."""

BACKEND = "saccade.adapters.vllm.plugin.SaccadeBackend"
"""Where vLLM finds our attention backend."""


def reasons_against(vllm_config: Any, options: ServeOptions) -> list[str]:
    """Every reason why an engine cannot decode under the policy; empty if it can."""
    rectify, drafts = options.rewrites, options.drafts
    rectification = [] if rectify is None else reasons_against_rectifying(vllm_config, rectify)
    unmet = unmet_by_drafts(vllm_config, options) if drafts else ()
    rectification += [f"rectify={drafts}:verify {reason}" for reason in unmet]
    model = _model(vllm_config)
    # A model that no policy fits needs no second reason.
    return [*model, *_engine(vllm_config, options), *rectification, *([] if model else _fit(vllm_config, options))]


def refuse_unsupported(vllm_config: Any, options: ServeOptions) -> None:
    """Raise a ServingError with all that `reasons_against` finds."""
    reasons = reasons_against(vllm_config, options)
    if reasons:
        raise ServingError(f"saccade cannot serve {vllm_config.model_config.model} here: " + "; ".join(reasons))


def _model(vllm_config: Any) -> list[str]:
    config = vllm_config.model_config
    if config.use_mla:
        return [LATENT]
    if config.is_encoder_decoder or config.runner_type == "pooling":
        return ["only text decoders that generate are supported"]
    text, advice = config.hf_text_config, "if requests never exceed the window, pass --disable-sliding-window"
    kinds = mixed_kinds(text, config.max_model_len)
    if (config.has_inner_state or config.is_hybrid) and not kinds:
        return ["its configuration does not say which of its layers have full attention"]
    missing = reasons_in_sizes(text)
    reasons = missing + reasons_in_kinds(text, config.max_model_len, advice)
    reasons += reasons_in(text, honoured="kv_lora_rank")
    sizes = None if missing else shape_of_text(text)
    # Where a low rank could be cached and is not (MiniCPM3), vLLM pads values.
    if sizes and sizes.value_width != sizes.head_dim and not getattr(text, "kv_lora_rank", None):
        told = f"its values are {sizes.value_width} wide, its keys {sizes.head_dim}"
        reasons.append(f"{told}: vLLM has a backend of its own for them")
    if CHUNKED in kinds:
        reasons.append("layers that attend in chunks: vLLM runs them with the backend of those with full attention")
    return reasons


def _engine(vllm_config: Any, options: ServeOptions) -> list[str]:
    parallel, cache, reasons = vllm_config.parallel_config, vllm_config.cache_config, []
    if vllm_config.speculative_config is not None and not options.drafts:
        told = "speculative decoding verifies several tokens at once; a policy decodes them one by one"
        reasons.append(f"{told}, or drafts them itself: rectify=8:verify")
    if parallel.pipeline_parallel_size > 1:
        reasons.append("pipeline parallelism separates the layers that share a selection; use --tensor-parallel-size")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        reasons.append("context parallelism spreads a row's tokens over ranks, and selection ranks them all")
    if parallel.use_ubatching:
        reasons.append("micro-batches run several batches in one step (--enable-dbo, --ubatch-size)")
    kv_heads, ranks = vllm_config.model_config.get_total_num_kv_heads(), parallel.tensor_parallel_size
    if kv_heads % ranks:
        split = "unevenly, and a head's group cannot be split"
        reasons.append(f"tensor_parallel_size={ranks} splits {kv_heads} KV heads {split}")
    return [*reasons, *(reasons_against_dtype(cache) or _bytes(vllm_config))]


def _bytes(vllm_config: Any) -> list[str]:
    """Why vLLM's own kernels would fail at the first prompt; what else they cannot, they say when an engine starts."""
    from vllm.platforms import current_platform

    cache, dtype = vllm_config.cache_config, vllm_config.model_config.dtype
    held, block = cache.cache_dtype, cache.block_size
    if held not in FP8:
        return []
    if not current_platform.is_cpu():
        told = f"dtype={dtype}: over kv_cache_dtype={held} vLLM's FlashAttention answers in bfloat16 alone"
        return [] if dtype == torch.bfloat16 else [f"{told}; pass --dtype bfloat16"]
    if not block or not block % unit():
        return []
    return [f"block_size={block}: on CPUs vLLM keeps kv_cache_dtype={held} in multiples of {unit()} tokens"]


def _room(vllm_config: Any, page: int | None) -> list[str]:
    """Why the longest request would not fit into a cache whose size was chosen, by vLLM's own sums; it looks later.

    Of the layers that a policy concerns, which bounds pages of `page` tokens.
    """
    config, cache = vllm_config.model_config, vllm_config.cache_config
    blocks, given, block = cache.num_gpu_blocks_override, cache.kv_cache_memory_bytes, cache.block_size
    # Of -1 vLLM finds the length that fits.
    if config.original_max_model_len == -1 or not block or not (blocks or given) or cache.cache_dtype not in VALID:
        return []
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    shape, dtype = shape_of(vllm_config), number_type(cache.cache_dtype, config.dtype)
    heads = max(shape.kv_heads // vllm_config.parallel_config.tensor_parallel_size, 1)
    spec = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=shape.head_dim, dtype=dtype)
    layers = sum(kind == FULL for kind in shape.kinds or [FULL] * shape.layers)
    bounds = 0 if page is None else bounds_bytes(block, page, heads, shape.head_dim, dtype.itemsize)
    held = blocks or given // (layers * (spec.page_size_bytes + bounds))
    # One block is nobody's.
    if spec.max_memory_usage_bytes(vllm_config) <= (held - 1) * spec.page_size_bytes:
        return []
    told = f"num_gpu_blocks_override={blocks} holds" if blocks else f"{given / 2**30:.2f} GiB of cache hold"
    more = "set more" if blocks else "set aside more (--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE)"
    told = f"{told} {max(held - 1, 0) * block} tokens, max_model_len={config.max_model_len} asks for more"
    return [f"{told}: lower --max-model-len or {more}"]


def _fit(vllm_config: Any, options: ServeOptions) -> list[str]:
    try:
        plan = plan_of(vllm_config, options)
    except PolicyError as error:
        return [str(error)]
    page = plan.bounds_page
    reasons, block = _early(vllm_config, options, plan), vllm_config.cache_config.block_size
    reasons += _room(vllm_config, page)
    if page is not None and block is not None and block % page:
        better = lcm(page, unit())
        reasons.append(f"block_size={block} is no multiple of the policy's page={page}; pass --block-size {better}")
    if plan.reads_text and vllm_config.scheduler_config.async_scheduling and not vllm_config.use_v2_model_runner:
        reasons.append(
            "chunks of text need the tokens, which model runner V1 has too late when it schedules asynchronously: pass "
            "--no-async-scheduling, or set VLLM_USE_V2_MODEL_RUNNER=1"
        )
    index = None
    if plan.selector is not None:
        shape = shape_of(vllm_config)
        k = torch.zeros((1, 1, shape.kv_heads, shape.head_dim), dtype=vllm_config.model_config.dtype, device="cpu")
        one = KVView(k, k, Rows.on_host(torch.zeros((1, 1), dtype=torch.int32, device="cpu"), [0], [1]))
        index = plan.selector.new_index(one)
    if index is not None and not isinstance(index, PageBounds):
        reasons.append(
            f"policy {options.policy} keeps something of pages other than bounds of their keys, for which vLLM's cache "
            "has no room: an index of its own must lie in slots (docs/method.md)"
        )
    held = vllm_config.cache_config.cache_dtype
    if plan.owns_index and held in FP8:
        reasons.append(f"kv_cache_dtype={held}: {options.policy} keeps means in the cache's dtype; do not quantise it")
    if plan.owns_index and options.rewrites is not None and vllm_config.use_v2_model_runner:
        reasons.append(
            "model runner V2 takes every dense pass for a new request, whose index is lost: set "
            "VLLM_USE_V2_MODEL_RUNNER=0, or rectify=none"
        )
    return reasons


def _early(vllm_config: Any, options: ServeOptions, plan: Plan) -> list[str]:
    """What needs no setting that vLLM still makes; of random weights no layer is the right one."""
    reasons = _connector(vllm_config, options, plan)
    if plan.guessed is None or vllm_config.load_config.load_format == "dummy":
        return reasons
    policy, model = options.policy, vllm_config.model_config.model
    find = f"`saccade calibrate layers --model {model} --policy {policy.name}` or `saccade serve … --calibrate TEXTS`"
    told = f"policy {policy}: no layer is known for {model}; find it with {find}, or name one, {plan.guessed}=LAYER"
    return [told, *reasons]


def _connector(vllm_config: Any, options: ServeOptions, plan: Plan) -> list[str]:
    """Why a KV connector would carry away what sparse steps wrote, or bring back too little; the known one may run.

    vLLM's offloading takes full blocks among tokens that its scheduler knows, behind the step that computes the last
    one. Drafts lie behind them all, and what they wrote of these the verifying step has rewritten. Of a block it takes
    keys and values; to where, a spec of others may say too.
    """
    given = vllm_config.kv_transfer_config
    name = None if given is None else given.kv_connector
    if name is None:
        return []
    outside, more = given.kv_connector_module_path, given.kv_connector_extra_config
    if name != OFFLOADING or outside:
        told = f"KV connector {name}" + (f" of {outside}" if outside else "")
        return [f"{told} is not known to leave behind what sparse steps wrote; vLLM's own {OFFLOADING} is"]
    if plan.bounds_page is not None:
        told = f"bounds of pages, which {options.policy} searches"
        return [f"KV connector {name} brings keys back without their {told}: choose a policy that bounds no pages"]
    if not options.drafts and more.get(PROMPTS) is not True:
        told = f'set "{PROMPTS}": true in its kv_connector_extra_config, or rectify=8:verify'
        return [f"KV connector {name} would carry answers away, which sparse steps wrote: {told}"]
    # There a streaming session's answers, a part of its next prompt, have hashes of ours or were set back.
    if not options.drafts and not vllm_config.cache_config.enable_prefix_caching:
        told = "without it answers of streaming sessions would leave as prompts"
        return [f"KV connector {name} needs the prefix cache (--enable-prefix-caching): {told}"]
    return [moved] if (moved := problem("offloading")) else []


def reasons_against_search(vllm_config: Any, policy: Policy) -> list[str]:
    """Why transformers can look for no layer of a policy before this engine starts; one line each."""
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    lacks = lacks_layer(policy)
    form, ranks = vllm_config.load_config.load_format, parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    against = {
        f"policy {policy} names its layer or needs none": not lacks,
        f"policy {policy} has no budget, at which a layer is found": lacks and policy.budget is None,
        f"transformers reads the model on one device, not on {ranks}": ranks > 1,
        f"transformers reads safetensors, not --load-format {form}": form not in ("auto", "safetensors"),
        "transformers is not told --hf-overrides": bool(config.hf_overrides),
        f"the search takes the model's own tokenizer, not {config.tokenizer}": config.tokenizer != config.model,
        f"transformers reads the newest revision, not --revision {config.revision}": config.revision is not None,
        "its weights are quantised (quantization_config): find the layer with those they were made from, and name it": (
            getattr(config.hf_config, "quantization_config", None) is not None
        ),
    }
    return [f"--calibrate: {reason}" for reason, holds in against.items() if holds]


def unit() -> int:
    """Tokens of which a cache block is best a multiple: vLLM's, and on CPUs those that its kernels are made for."""
    from vllm.platforms import current_platform

    return 32 if current_platform.is_cpu() else 16


def refuse_early(vllm_config: Any) -> None:
    """Raise a ServingError, before there is an engine, if it is told what none could do; in the process that starts it.

    What depends on settings that vLLM still makes is left to the workers.
    """
    try:
        options = ServeOptions.of(vllm_config)
        if options is None:
            return
        refuse_detached(vllm_config)
        reasons = [] if _model(vllm_config) else _early(vllm_config, options, plan_of(vllm_config, options))
    except PolicyError as error:  # a ValueError, of which pydantic would make one of its own
        raise ServingError(str(error)) from None
    if reasons:
        raise ServingError("; ".join(reasons))


def refuse_detached(vllm_config: Any) -> None:
    """Raise a ServingError for an engine that was given our options and would not decode under them."""
    check_interfaces("every process")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden() or custom.get_path() != BACKEND:
        raise ServingError("vLLM did not load the plugin saccade: VLLM_PLUGINS names others only; add saccade to it")
    attention, model = vllm_config.attention_config, vllm_config.model_config
    apart, given = windows_apart(model), attention.backend_per_kind or {}
    full, windowed = (given.get(kind, attention.backend) for kind in (FULL_KIND, WINDOW_KIND))
    # A window that no row exceeds is one all the same to vLLM.
    hidden = not apart and any(values_in(model.hf_text_config, "sliding_window"))
    for backend in (full, windowed) if hidden else (full,):
        if backend is not custom:
            flag = PER_KIND if apart else "--attention-backend CUSTOM"
            told = "" if backend is None else f", not {backend.name}"
            raise ServingError(f"saccade's options need {flag}{told}: no other decodes sparsely")
    if apart and windowed is custom:
        raise ServingError(f"this model has layers with a window, which are left to vLLM: pass {PER_KIND}")


def windows_apart(model_config: Any) -> bool:
    """Whether a model has layers with a window beside those that a policy concerns, so that backends go by kind."""
    return SLIDING in mixed_kinds(model_config.hf_text_config, model_config.max_model_len)


def reasons_against_rectifying(vllm_config: Any, rectify: Rectify) -> list[str]:
    """Why an engine with these settings cannot rectify; one line each, which names the flag.

    What is said under every policy (speculative decoding, KV connectors, pipeline parallelism) is not repeated.
    """
    scheduling = vllm_config.scheduler_config
    chunk, threshold = rectify.every + 1, scheduling.long_prefill_token_threshold
    reasons = []
    kinds = mixed_kinds(vllm_config.model_config.hf_text_config, vllm_config.model_config.max_model_len)
    if gone := sorted({*kinds} - {FULL, SLIDING}):
        told = ", ".join(gone)
        reasons.append(f"rectify={rectify} computes tokens again, and layers of type {told} have forgotten theirs")
    chosen = scheduling.get_scheduler_cls()
    if not getattr(chosen, "rectifies", False):
        reasons.append(f"rectify={rectify} needs --scheduler-cls {SCHEDULER}")
    elif scheduling.async_scheduling and not chosen.schedules_ahead:
        told = f"{chosen.__name__} schedules synchronously: derive it from AheadScheduler"
        reasons.append(f"rectify={rectify}: {told}, or pass --no-async-scheduling")
    if rectify.mode == "verify":
        reasons.append(f"rectify={rectify} needs vLLM's own scheduler: leave out --scheduler-cls")
    if scheduling.async_scheduling and not rectifies_ahead(vllm_config):
        told = "model runner V1, and models with M-RoPE, have its tokens too late when steps are scheduled ahead"
        reasons.append(f"rectify={rectify} needs --no-async-scheduling: {told}")
    batched, scheduled = scheduling.max_num_batched_tokens, scheduling.max_num_scheduled_tokens
    if batched < chunk:
        reasons.append(f"--max-num-batched-tokens {batched} cannot hold a dense pass of {chunk} tokens")
    if scheduled is not None and scheduled < chunk:
        reasons.append(f"max_num_scheduled_tokens={scheduled} cannot hold a dense pass of {chunk} tokens")
    if 0 < threshold < chunk:
        reasons.append(f"--long-prefill-token-threshold {threshold} would cut a dense pass of {chunk} tokens in two")
    return reasons


def rectifies_ahead(vllm_config: Any) -> bool:
    """Whether dense passes can be scheduled before the step ahead of them is done."""
    return bool(vllm_config.use_v2_model_runner and not vllm_config.model_config.uses_mrope)


def plan_of(vllm_config: Any, options: ServeOptions) -> Plan:
    """The policy bound to the whole model, or a PolicyError; its notes begin with those of the options."""
    policy, shape = options.policy, shape_of(vllm_config)
    plan = policy.plan(shape)
    if options.drafts and plan.owns_index:
        # Its sets hold what drafts attend to and may be in no index yet.
        given, behind = policy.options.model_dump(exclude_unset=True), f"{CYCLES * options.drafts}:verify"
        plan = Policy.create(policy.name, {**given, "rectify": behind}).plan(shape)
    return replace(plan, notes=(*options.notes, *plan.notes))
