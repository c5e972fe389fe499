"""Which transformers models can decode sparsely; everything else is refused with the reason before any work."""

import os
import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...checkpoints.shape import shape_of
from ...checkpoints.unsupported import reasons_in, reasons_in_kinds, reasons_in_sizes
from ...checkpoints.versions import cache_argument
from ...errors import UnsupportedModelError
from ...kernels._native import library
from ...kernels._native.attention import ITEM_SIZE
from ...kernels._triton.refusals import installed
from ...methods.policy import Policy
from ...types import CHUNKED, FULL, SLIDING, ModelShape
from . import attention

COMPILED = "it is compiled by torch.compile, which would freeze the decisions of one step; attach to the plain model"
NO_CACHE = "use_cache=False leaves nothing to select from; saccade needs the KV cache, so leave it out"
KNOWN = (None, "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Implementations whose attention is that of sdpa, rounding aside."""
_CACHES = ("cache_implementation", "use_cache")


def refuse_unsupported(model: Any) -> None:
    """Raise an UnsupportedModelError with every reason why a model cannot be attached."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        got = repr(model) if isinstance(model, (str, os.PathLike, type(None))) else type(model).__name__
        advice = "load one with transformers.AutoModelForCausalLM.from_pretrained; of a pipeline, pass its .model"
        reasons = [f"expected a loaded transformers model, got {got}; {advice}"]
    elif any(map(_compiled, model.modules())):
        reasons = [COMPILED]
    else:
        reasons = [*_structure(model), *reasons_in(text_config(model), honoured="num_kv_shared_layers"), *_state(model)]
    if reasons:
        raise UnsupportedModelError(f"saccade cannot run {type(model).__name__}: " + "; ".join(reasons))


def refuse_generation(model: Any, given: Mapping[str, Any]) -> None:
    """Raise an UnsupportedModelError, before transformers makes anything of it, for what `generate` is asked for and
    selection cannot honour: a cache that is quantised or kept elsewhere, none at all, or drafts of few layers."""
    places = given, vars(given.get("generation_config") or model.generation_config)
    kind, uses = (next((v for place in places if (v := place.get(name)) is not None), None) for name in _CACHES)
    if isinstance(kind, str) and ("offloaded" in kind or kind in ("quantized", "paged")):
        raise UnsupportedModelError(
            f"cache_implementation={kind!r} is not supported: selection reads the plain cache every step; leave it out"
        )
    if uses is False:
        raise UnsupportedModelError(NO_CACHE)
    if any(place.get("assistant_early_exit") for place in places):
        raise UnsupportedModelError("assistant_early_exit drafts with few layers, and a policy needs all; leave it out")


def against_rewinding(policy: Policy, shape: ModelShape) -> str | None:
    """Why a rectified policy cannot run on layers that forget for good, so that no token can be run again; or None."""
    gone = sorted({*shape.kinds} - {FULL, SLIDING, CHUNKED})
    if policy.rectify is None or not gone:
        return None
    forgotten = f"layers of type {', '.join(gone)} have forgotten what came before them"
    return f"{policy}: rectification takes tokens back, and {forgotten}; use rectify=none"


def refuse_rewinding(policy: Policy, shape: ModelShape) -> None:
    """Raise an UnsupportedModelError with what `against_rewinding` finds."""
    if reason := against_rewinding(policy, shape):
        raise UnsupportedModelError(reason)


def left_out(model: Any) -> tuple[str, ...]:
    """What the model's stock attention leaves out of its configuration, and saccade with it."""
    caps = set(map(attention.soft_cap_of, full_attention(model))) - {None}
    if not caps or decoder_of(model).config._attn_implementation != "sdpa":
        return ()
    advice = "load the model with attn_implementation='eager' to have it"
    return (
        f"transformers' sdpa attention leaves out the soft-cap {caps.pop():g} of the logits, and so do we: {advice}",
    )


def slow_kernels(model: Any) -> tuple[str, ...]:
    """What the user should know where saccade's own kernels cannot run, and what to do about it."""
    device, dtype, shape = model.device.type, model.dtype, shape_of(model.config)
    if shape.value_dim not in (None, shape.head_dim):
        return (f"torch's slower kernels run: its values are {shape.value_dim} wide, its keys {shape.head_dim}",)
    if device == "cpu" and library.library() is None:
        return ("torch's kernels run, which are slower: saccade found no C compiler at install (see saccade doctor)",)
    if device == "cpu" and dtype not in ITEM_SIZE:
        return (f"torch's kernels run, since saccade's on a CPU take no {dtype}: load the model in torch.bfloat16",)
    if device == "cuda" and not installed():
        return ("torch's kernels run, which are slower: triton is not installed (pip install triton)",)
    return ()


def attention_modules(model: nn.Module) -> list[Any]:
    """Attention modules in layer order."""
    marks = ("layer_idx", "is_causal", "scaling")
    found: list[Any] = [module for module in model.modules() if all(hasattr(module, mark) for mark in marks)]
    # Without a number are those that keep nothing in the cache: cross-attention to an image, say.
    return sorted(found, key=lambda module: -1 if module.layer_idx is None else int(module.layer_idx))


def full_attention(model: Any) -> list[Any]:
    """Attention modules of the layers that a policy concerns, in order."""
    full = set(shape_of(model.config).full_layers)
    return [module for module in attention_modules(decoder_of(model)) if module.layer_idx in full]


def decoder_of(model: Any) -> Any:
    """What runs the layers, without a head; some models name themselves."""
    decoder = model.get_decoder()
    parts = model.children() if decoder is model else ()
    return next((part for part in parts if isinstance(part, PreTrainedModel)), decoder)


def text_config(model: Any) -> Any:
    """Of the decoder, which of a multimodal model is a part."""
    return model.config.get_text_config(decoder=True)


def has_own_cache(model: Any) -> bool:
    """Whether a model makes a cache of its own class, and takes no other."""
    return not model._supports_default_dynamic_cache()


def empty_cache(model: Any) -> DynamicCache | None:
    """What a model would make for itself, None where only it can; layers that keep everything need no configuration."""
    if has_own_cache(model):
        return None
    return DynamicCache(config=text_config(model)) if shape_of(model.config).kinds else DynamicCache()


def cached(model: Any, cache: Any) -> dict[str, Any]:
    """The arguments of a call of a model that reads and fills a cache."""
    return {cache_argument(model): cache, "use_cache": True}


def _compiled(module: Any) -> bool:
    """Whether a module was compiled in one of the ways that torch has for it."""
    forward = vars(module).get("forward")
    wrapped = hasattr(module, "_orig_mod") or hasattr(forward, "_torchdynamo_orig_callable")
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def _structure(model: Any) -> list[str]:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return ["encoder-decoder models are not supported, only decoders"]
    if not hasattr(model, "generate") or not getattr(model, "can_generate", bool)():
        return ["it has no language-model head; load it with AutoModelForCausalLM"]
    if not hasattr(model, "_supports_default_dynamic_cache"):
        return ["it generates by code of its own and not by transformers' generate"]
    if not hasattr(model, "set_attn_implementation") or not model._can_set_attn_implementation():
        return ["its code does not go through transformers' AttentionInterface"]
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:
        embeddings = None
    if not hasattr(embeddings, "weight"):
        return ["its input embeddings are no single table, by which models are told apart"]
    longest = getattr(text_config(model), "max_position_embeddings", None)
    advice = "if you never exceed the window, load the model with sliding_window=None"
    none = reasons_in_kinds(text_config(model), longest, advice) or reasons_in_sizes(text_config(model))
    if none:
        return none
    decoder, shape = decoder_of(model), shape_of(config)
    full, modules = list(shape.full_layers), full_attention(model)
    if [module.layer_idx for module in modules] != full:
        return [f"found {len(modules)} plain attention layers for {len(full)} decoder layers"]
    if own := _own_attention(decoder, modules):
        return [own]
    sharing = [module.layer_idx for module in modules if getattr(module, "is_kv_shared_layer", False)]
    if sharing != [layer for layer in full if layer in shape.sources]:
        return [f"its layers {sharing} share a KV cache, which its configuration does not say of these"]
    groups, told = {getattr(module, "num_key_value_groups", 1) for module in modules}, shape.group
    if groups != {told}:
        return [f"its layers have {sorted(groups)} query heads per KV head, its configuration says {told}"]
    return []


def _own_attention(decoder: Any, modules: list[Any]) -> str | None:
    """What computes a model's attention if it is none that sdpa and eager equal; None otherwise."""
    name, advice = decoder.config._attn_implementation, "load it with attn_implementation='sdpa' or 'eager'"
    if name not in (*KNOWN, attention.NAME, attention.EAGER) and not re.fullmatch("kernels-community/.*flash.*", name):
        return f"its attention is {name!r}, which may differ from sdpa: {advice}"
    if ALL_ATTENTION_FUNCTIONS.get("sdpa") is not sdpa_attention_forward:
        return "the attention function 'sdpa' was registered anew in this process, and may differ from torch's"
    for module in modules:
        # accelerate keeps the forward that it wraps.
        own = vars(module).get("_old_forward", vars(module).get("forward"))
        own = type(module).forward if own is None else getattr(own, "__func__", own)
        classes = [kind for kind in type(module).__mro__ if "forward" in vars(kind)]
        if own is not vars(classes[0])["forward"] or own.__module__ != classes[0].__module__:
            return f"the forward of its {type(module).__name__} was replaced, and may not go through AttentionInterface"
    return None


def _state(model: Any) -> list[str]:
    reasons = ["it is in training mode; call model.eval()"] if model.training else []
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1 or devices & {"disk", "meta"}:
        advice = 'load it with device_map="cuda", or serve what one cannot hold with vLLM, --tensor-parallel-size'
        reasons.append(f"its layers are spread over {', '.join(sorted(devices))}, one device is supported: {advice}")
    return reasons
