"""What of a model's attention selection cannot honour, and why: one wording for configurations, layers and calls."""

from __future__ import annotations

from typing import Any

SOFT_CAP = "a logit soft-cap changes the scores that selection ranks"
POSITION_BIAS = "a position bias changes the scores that selection ranks"
ALIBI = "ALiBi biases change the scores that selection ranks"
SINKS = "attention sinks as parameters are not part of the cache"
LATENT = "multi-head latent attention caches no keys per head"
SHARED_CACHE = "layers that share a KV cache are not supported"
CHUNKED = "chunked attention already limits what layers see"
NO_CACHE = "keep no plain KV cache"
TWICE = "differential attention attends twice in a layer, and every attention would count as a step"

_CONFIGURED = {
    "attn_logit_softcapping": SOFT_CAP,
    "num_kv_shared_layers": SHARED_CACHE,
    "attention_chunk_size": CHUNKED,
    "alibi": ALIBI,
    "lambda_std_dev": TWICE,
}

_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


def values_in(config: Any, name: str) -> list[Any]:
    """What a configuration says of a name; of each layer in turn where it keeps that apart, None where it is silent."""
    # Of the whole configuration such a name cannot be read: transformers raises an error of its own.
    apart = name in (getattr(config, "per_layer_attributes", None) or ())
    return [getattr(one, name, None) for one in (config.per_layer_config if apart else [config])]


def reasons_in_sizes(config: Any) -> list[str]:
    """Why a configuration gives no sizes that hold for all layers, a line each."""
    found = {name: list(dict.fromkeys(values_in(config, name))) for name in _SIZES}
    missing = [f"its configuration has no {name}" for name in _SIZES[:2] if None in found[name]]
    several = {name: ", ".join(map(str, values)) for name, values in found.items() if len(values) > 1}
    return missing + [
        f"its layers differ in {name} ({told}); one shape must hold for all" for name, told in several.items()
    ]


def reasons_in(config: Any, longest: int | None, advice: str, **further: str) -> list[str]:
    """Every feature that hides tokens from a text model's layers or alters their scores, a line each.

    `longest` is the longest row: a window as wide hides nothing. `advice` is for whoever has a narrower one; `further`
    names what a runtime cannot honour beside what none can.
    """
    kinds, known = getattr(config, "layer_types", None), {**_CONFIGURED, **further}
    unknown = sorted(set(kinds or ()) - {"full_attention", "sliding_attention"})
    used = getattr(config, "use_sliding_window", True) if kinds is None else "sliding_attention" in kinds
    window = min((w for w in values_in(config, "sliding_window") if used and w is not None), default=None)
    reasons = [f"layers of type {', '.join(unknown)} {NO_CACHE}"] if unknown else []
    if window is not None and longest is not None and window < longest:
        reasons.append(f"sliding-window attention (sliding_window={window}) already limits what layers see; {advice}")
    found = {name: next(filter(None, values_in(config, name)), None) for name in known}
    return reasons + [f"{name}={value}: {known[name]}" for name, value in found.items() if value]
