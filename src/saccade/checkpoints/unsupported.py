"""What of a model's attention selection cannot honour, and why: one wording for configurations, layers and calls."""

from typing import Any

from ..types import CHUNKED, FULL, SLIDING

POSITION_BIAS = "a position bias changes the scores that selection ranks"
ALIBI = "ALiBi biases change the scores that selection ranks"
LATENT = "multi-head latent attention caches no keys per head"
SHARED_CACHE = "layers that share a KV cache are not supported"
TWICE = "differential attention attends twice in a layer, and every attention would count as a step"

_CONFIGURED = {
    "num_kv_shared_layers": SHARED_CACHE,
    "kv_lora_rank": LATENT,
    "alibi": ALIBI,
    "lambda_std_dev": TWICE,
}

_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


def values_in(config: Any, name: str) -> list[Any]:
    """What a configuration says of a name; of each layer in turn where it keeps that apart, None where it is silent."""
    # Of the whole configuration such a name cannot be read: transformers raises an error of its own.
    apart = name in (getattr(config, "per_layer_attributes", None) or ())
    return [getattr(one, name, None) for one in (config.per_layer_config if apart else [config])]


def kinds_in(config: Any, longest: int | None) -> tuple[str, ...]:
    """What every layer of a text model is, in transformers' words; a window as wide as `longest` hides nothing."""
    layers = getattr(config, "num_hidden_layers", None) or 0
    windows, kinds = values_in(config, "sliding_window"), getattr(config, "layer_types", None)
    if kinds is None:
        used = getattr(config, "use_sliding_window", True)
        chunked = getattr(config, "attention_chunk_size", None) is not None
        kinds = [CHUNKED if chunked else SLIDING if used and windows[0] is not None else FULL] * layers
    windows = windows if len(windows) == len(kinds) else windows * len(kinds)

    def hides(window: int | None) -> bool:
        return window is not None and longest is not None and window < longest

    pairs = zip(kinds, windows, strict=True)
    return tuple(FULL if kind == SLIDING and not hides(window) else kind for kind, window in pairs)


def mixed_kinds(config: Any, longest: int | None) -> tuple[str, ...]:
    """As `kinds_in`, and nothing where all layers have full attention: what a `ModelShape` holds."""
    kinds = kinds_in(config, longest)
    return () if set(kinds) <= {FULL} else kinds


def sources_in(config: Any) -> dict[int, int]:
    """Of layers that keep no keys and values, the one whose they read: the last of their type below all that share."""
    kinds = getattr(config, "layer_types", None) or [FULL] * (getattr(config, "num_hidden_layers", None) or 0)
    own = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    last = {kind: layer for layer, kind in enumerate(kinds[:own])}
    return {layer: last[kind] for layer, kind in enumerate(kinds) if layer >= own and kind in last}


def sizes_in(config: Any) -> dict[str, list[Any]]:
    """What a configuration says of the sizes of its layers with full attention, none twice."""
    kinds, found = kinds_in(config, getattr(config, "max_position_embeddings", None)), {}
    for name in _SIZES:
        values = values_in(config, name)
        full = [one for one, kind in zip(values, kinds, strict=True) if kind == FULL] if len(values) > 1 else values
        found[name] = list(dict.fromkeys(full))
    return found


def reasons_in_sizes(config: Any) -> list[str]:
    """Why a configuration gives no sizes that hold for all layers with full attention, a line each."""
    found = sizes_in(config)
    missing = [f"its configuration has no {name}" for name in _SIZES[:2] if None in found[name]]
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if shared > len(sources_in(config)):
        missing.append(f"num_kv_shared_layers={shared}: no layer below keeps what all of them are to read")
    several = ((name, ", ".join(map(str, values))) for name, values in found.items() if len(values) > 1)
    return missing + [f"its layers differ in {name} ({told}); one shape must hold for all" for name, told in several]


def reasons_in(config: Any, honoured: str) -> list[str]:
    """Every feature of a text model that alters the scores of its layers, or what they keep, a line each.

    `honoured` names the one that no runtime but this can honour.
    """
    found = {name: next(filter(None, values_in(config, name)), None) for name in _CONFIGURED if name != honoured}
    return [f"{name}={value}: {_CONFIGURED[name]}" for name, value in found.items() if value]


def reasons_in_kinds(config: Any, longest: int | None, advice: str) -> list[str]:
    """Why the layers' kinds leave nothing to a policy: it needs one with full attention.

    `longest` is the longest row, and `advice` for whoever never has such a long one.
    """
    kinds = kinds_in(config, longest)
    if not kinds or FULL in kinds:
        return []
    told = ", ".join(sorted(set(kinds)))
    return [f"none of its layers has full attention: {told}{f'; {advice}' if SLIDING in kinds else ''}"]
