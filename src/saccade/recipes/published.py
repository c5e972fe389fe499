"""The papers' re-selection layers as recipes. Nobody has measured them again with this package."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..errors import PolicyError, meant
from ..methods.policy import Policy
from ..plans.identity import same_model
from ..types import ModelShape
from .recipe import Recipe

MARK = "from the paper, not re-measured here"

PREFIX = "recipe:"
"""Before the name of one, where a policy is asked for."""

_PAPERS = {"tidal": "TidalDecode, arXiv 2410.05076", "less_is_more": "LessIsMore, arXiv 2508.07101"}
# Layers, query heads, KV heads, head dimension, architecture, weights, hidden size, intermediate size.
_LLAMA_2_7B = ModelShape(32, 32, 32, 128, "llama", None, 4096, 11_008)
_LLAMA_3_8B = ModelShape(32, 32, 8, 128, "llama", None, 4096, 14_336)
_LLAMA_3_70B = ModelShape(80, 64, 8, 128, "llama", None, 8192, 28_672)
_LLAMA_3_2_3B = ModelShape(28, 24, 8, 128, "llama", None, 3072, 8192)
_QWEN3_4B = ModelShape(36, 32, 8, 128, "qwen3", None, 2560, 9728)
_QWEN3_8B = ModelShape(36, 32, 8, 128, "qwen3", None, 4096, 12_288)
_QWEN3_14B = ModelShape(40, 40, 8, 128, "qwen3", None, 5120, 17_408)
_REASONING = "section 4.2 and table 11"


def _recipe(shape: ModelShape, method: str, layer: int, tables: str, *models: str) -> Recipe:
    """A paper's choice for the models of these hub names, as if it had been read from a file."""
    found = {"by": f"{_PAPERS[method]}, {tables}", "models": list(models), "mark": MARK}
    return Recipe(shape, Policy.create(method, {"reselect": (layer,)}), (layer,), found=found, versions={})


def _tuned(*models: str) -> tuple[str, ...]:
    """Meta's hub names, each with that of its instruction-tuned sibling."""
    return tuple(f"meta-llama/{model}{suffix}" for model in models for suffix in ("", "-Instruct"))


_LLAMA_2 = ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf", "NousResearch/Yarn-Llama-2-7b-128k")
_DEEPSEEK = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
_LESS, _TIDAL = "less_is_more", "tidal"
_LLAMA_3 = (_LLAMA_3_8B, _LESS, 13, "tables 6 and 11")
_70B = (*_tuned("Meta-Llama-3-70B"), "gradientai/Llama-3-70B-Instruct-Gradient-1048k")

PUBLISHED: Mapping[str, Recipe] = MappingProxyType(
    {
        "llama-3-8b": _recipe(*_LLAMA_3, *_tuned("Meta-Llama-3-8B"), "gradientai/Llama-3-8B-Instruct-Gradient-1048k"),
        "llama-3.1-8b": _recipe(*_LLAMA_3, *_tuned("Llama-3.1-8B", "Meta-Llama-3.1-8B")),
        "llama-3-70b-10k": _recipe(_LLAMA_3_70B, _TIDAL, 31, "tables 2 and 11, at 10K tokens", *_70B),
        "llama-3-70b-32k": _recipe(_LLAMA_3_70B, _TIDAL, 14, "table 2, at 32K tokens", *_70B),
        "llama-3.2-3b": _recipe(_LLAMA_3_2_3B, _TIDAL, 12, "table 9", *_tuned("Llama-3.2-3B")),
        "llama-2-7b": _recipe(_LLAMA_2_7B, _TIDAL, 7, "section 4.4 and table 14", *_LLAMA_2),
        "longchat-7b": _recipe(_LLAMA_2_7B, _LESS, 7, "tables 11 and 14", "lmsys/longchat-7b-v1.5-32k"),
        "qwen3-4b": _recipe(_QWEN3_4B, _LESS, 20, _REASONING, "Qwen/Qwen3-4B"),
        "qwen3-8b": _recipe(_QWEN3_8B, _LESS, 12, _REASONING, "Qwen/Qwen3-8B"),
        "qwen3-14b": _recipe(_QWEN3_14B, _LESS, 12, _REASONING, "Qwen/Qwen3-14B"),
        "deepseek-r1-distill-llama-8b": _recipe(_LLAMA_3_8B, _LESS, 12, _REASONING, _DEEPSEEK),
    }
)
"""By what `recipe:NAME` calls them; `found` says by which paper and for which models."""


def published(name: str) -> Recipe:
    """The published recipe of that name.

    Raises:
        PolicyError: if there is none; the message lists those there are.
    """
    try:
        return PUBLISHED[name]
    except KeyError:
        near = meant(name, PUBLISHED)
        raise PolicyError(f"unknown recipe {PREFIX}{name}; published are {', '.join(PUBLISHED)}{near}") from None


def note(name: str) -> str:
    """What whoever decodes with a published recipe should know."""
    return f"recipe {name} ({PUBLISHED[name].found['by']}): {MARK}"


def for_model(model: str, shape: Callable[[], ModelShape]) -> str | None:
    """The name of the published recipe for a hub id or folder that bears a model's name, whoever owns it; or None.

    The model's shape must have the recipe's sizes; it is asked for only if the name is known.

    Raises:
        PolicyError: if there are two, which the length of the context decides between; the message names both.
    """
    named = {name: one for name, one in PUBLISHED.items() if _bare(model) in map(_bare, one.found["models"])}
    fitting = [name for name, one in named.items() if same_model(one.model, shape())]
    if len(fitting) > 1:
        choices = " or ".join(f"{PREFIX}{name} ({named[name].found['by']})" for name in fitting)
        raise PolicyError(f"policy 'auto': two published recipes fit model {model!r}; choose {choices}")
    return fitting[0] if fitting else None


def _bare(model: str) -> str:
    """A model's name without its owner or folder, in lower case; a hub cache's snapshots bear their model's."""
    cached = re.search(r"models--[^/\\]*--([^/\\]+)[/\\]snapshots[/\\]", model)
    return (cached.group(1) if cached else re.split(r"[/\\]", model.rstrip("/\\"))[-1]).lower()
