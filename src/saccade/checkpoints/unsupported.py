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

_CONFIGURED = {
    "attn_logit_softcapping": SOFT_CAP,
    "num_kv_shared_layers": SHARED_CACHE,
    "attention_chunk_size": CHUNKED,
    "alibi": ALIBI,
}


def reasons_in(config: Any, **further: str) -> list[str]:
    """Every such feature that a text model's configuration names, a line each; `further` names what a runtime adds."""
    known = {**_CONFIGURED, **further}
    found = {name: getattr(config, name, None) for name in known}
    return [f"{name}={value}: {known[name]}" for name, value in found.items() if value]


def reasons_in_kinds(config: Any, supported: set[str]) -> list[str]:
    """The kinds of layer that a configuration names beside those `supported`, in one line."""
    kinds = set(getattr(config, "layer_types", None) or ()) - supported
    return [f"layers of type {', '.join(sorted(kinds))} {NO_CACHE}"] if kinds else []
