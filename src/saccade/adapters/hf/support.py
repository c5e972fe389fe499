"""Which transformers models can decode sparsely; everything else is refused with the reason before any work."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...checkpoints.shape import shape_of
from ...checkpoints.unsupported import LATENT, SINKS, reasons_in, reasons_in_kinds
from ...errors import UnsupportedModelError


def reasons_against(model: Any) -> list[str]:
    """Every reason why a model cannot be attached; empty if it can."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        return [f"expected a loaded transformers model, got {type(model).__name__}"]
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        return [
            "it is compiled by torch.compile, which would freeze the decisions of one step; attach to the plain model"
        ]
    return [*_structure(model), *_attention(model.config), *_state(model)]


def refuse_unsupported(model: Any) -> None:
    """Raise with all reasons.

    Raises:
        UnsupportedModelError: if `reasons_against` finds any.
    """
    reasons = reasons_against(model)
    if reasons:
        raise UnsupportedModelError(f"saccade cannot run {type(model).__name__}: " + "; ".join(reasons))


def attention_modules(model: nn.Module) -> list[Any]:
    """Attention modules in layer order."""
    marks = ("layer_idx", "is_causal", "scaling")
    found: list[Any] = [module for module in model.modules() if all(hasattr(module, mark) for mark in marks)]
    return sorted(found, key=lambda module: int(module.layer_idx))


def _structure(model: Any) -> list[str]:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return ["encoder-decoder models are not supported, only decoders"]
    if config.get_text_config() is not config:
        return ["multimodal models are not supported, only text decoders"]
    if not hasattr(model, "generate") or not getattr(model, "can_generate", bool)():
        return ["it has no language-model head; load it with AutoModelForCausalLM"]
    if not hasattr(model, "set_attn_implementation") or not model._can_set_attn_implementation():
        return ["its code does not go through transformers' AttentionInterface"]
    modules = attention_modules(model)
    if [module.layer_idx for module in modules] != list(range(config.num_hidden_layers)):
        return [f"found {len(modules)} plain attention layers for {config.num_hidden_layers} decoder layers"]
    groups, told = {getattr(module, "num_key_value_groups", 1) for module in modules}, shape_of(config).group
    if groups != {told}:
        return [f"its layers have {sorted(groups)} query heads per KV head, its configuration says {told}"]
    return []


def _attention(config: Any) -> list[str]:
    reasons = reasons_in_kinds(config, {"full_attention", "sliding_attention"})
    window = _window(config)
    if window is not None and window < getattr(config, "max_position_embeddings", window):
        reasons.append(
            f"sliding-window attention (sliding_window={window}) already limits what layers see; "
            "if you never exceed the window, load the model with sliding_window=None"
        )
    return reasons + reasons_in(config, kv_lora_rank=LATENT)


def _window(config: Any) -> int | None:
    """The sliding window in force, None if there is none."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    return window if getattr(config, "use_sliding_window", True) else None


def _state(model: Any) -> list[str]:
    reasons = []
    if model.training:
        reasons.append("it is in training mode; call model.eval()")
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1 or devices & {"disk", "meta"}:
        reasons.append(f"its layers are spread over {', '.join(sorted(devices))}; one device is supported")
    if any(hasattr(module, "sinks") and isinstance(module.sinks, torch.Tensor) for module in model.modules()):
        reasons.append(SINKS)
    return reasons
