"""The papers' re-selection layers as recipes. Nobody has measured them again with this package."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..errors import PolicyError
from ..methods.policy import Policy
from ..plans.identity import same_model
from ..types import ModelShape
from .recipe import Recipe

MARK = "from the paper, not re-measured here"

PREFIX = "recipe:"
"""Before the name of one, where a policy is asked for."""

_TIDAL = "TidalDecode, arXiv 2410.05076, "
_LESS_IS_MORE = "LessIsMore, arXiv 2508.07101, "
# Layers, query heads, KV heads, head dimension, architecture.
_LLAMA_2_7B = ModelShape(32, 32, 32, 128, "llama")
_LLAMA_3_8B = ModelShape(32, 32, 8, 128, "llama")
_LLAMA_3_70B = ModelShape(80, 64, 8, 128, "llama")
# Qwen3-4B differs from it in widths that no fingerprint knows.
_QWEN3_8B = ModelShape(36, 32, 8, 128, "qwen3")
_REASONING = "section 4.2 and table 11"
_LLAMA_3_70B_NAMES = (
    "meta-llama/Meta-Llama-3-70B meta-llama/Meta-Llama-3-70B-Instruct gradientai/Llama-3-70B-Instruct-Gradient-1048k"
)


def _recipe(shape: ModelShape, spec: str, source: str, models: str) -> Recipe:
    """A paper's choice for the models of these hub names, as if it had been read from a file."""
    policy = Policy.from_spec(spec)
    layers: tuple[int, ...] = policy.options.model_dump()["reselect"]
    found = {"by": source, "models": models.split(), "mark": MARK}
    return Recipe(shape, policy, layers, found=found, versions={})


PUBLISHED: Mapping[str, Recipe] = MappingProxyType(
    {
        "llama-3-8b": _recipe(
            _LLAMA_3_8B,
            "less_is_more:reselect=13",
            _LESS_IS_MORE + "tables 6 and 11",
            "meta-llama/Meta-Llama-3-8B meta-llama/Meta-Llama-3-8B-Instruct "
            "gradientai/Llama-3-8B-Instruct-Gradient-1048k",
        ),
        "llama-3.1-8b": _recipe(
            _LLAMA_3_8B,
            "less_is_more:reselect=13",
            _LESS_IS_MORE + "tables 6 and 11",
            "meta-llama/Llama-3.1-8B meta-llama/Llama-3.1-8B-Instruct "
            "meta-llama/Meta-Llama-3.1-8B meta-llama/Meta-Llama-3.1-8B-Instruct",
        ),
        "llama-3-70b-10k": _recipe(
            _LLAMA_3_70B, "tidal:reselect=31", _TIDAL + "tables 2 and 11, at 10K tokens", _LLAMA_3_70B_NAMES
        ),
        "llama-3-70b-32k": _recipe(
            _LLAMA_3_70B, "tidal:reselect=14", _TIDAL + "table 2, at 32K tokens", _LLAMA_3_70B_NAMES
        ),
        "llama-3.2-3b": _recipe(
            ModelShape(28, 24, 8, 128, "llama"),
            "tidal:reselect=12",
            _TIDAL + "table 9",
            "meta-llama/Llama-3.2-3B meta-llama/Llama-3.2-3B-Instruct",
        ),
        "llama-2-7b": _recipe(
            _LLAMA_2_7B,
            "tidal:reselect=7",
            _TIDAL + "section 4.4 and table 14",
            "meta-llama/Llama-2-7b-hf meta-llama/Llama-2-7b-chat-hf NousResearch/Yarn-Llama-2-7b-128k",
        ),
        "longchat-7b": _recipe(
            _LLAMA_2_7B, "less_is_more:reselect=7", _LESS_IS_MORE + "tables 11 and 14", "lmsys/longchat-7b-v1.5-32k"
        ),
        "qwen3-4b": _recipe(_QWEN3_8B, "less_is_more:reselect=20", _LESS_IS_MORE + _REASONING, "Qwen/Qwen3-4B"),
        "qwen3-8b": _recipe(_QWEN3_8B, "less_is_more:reselect=12", _LESS_IS_MORE + _REASONING, "Qwen/Qwen3-8B"),
        "qwen3-14b": _recipe(
            ModelShape(40, 40, 8, 128, "qwen3"),
            "less_is_more:reselect=12",
            _LESS_IS_MORE + _REASONING,
            "Qwen/Qwen3-14B",
        ),
        "deepseek-r1-distill-llama-8b": _recipe(
            _LLAMA_3_8B,
            "less_is_more:reselect=12",
            _LESS_IS_MORE + _REASONING,
            "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        ),
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
        raise PolicyError(f"unknown recipe {PREFIX}{name}; published are {', '.join(PUBLISHED)}") from None


def note(name: str) -> str:
    """What whoever decodes with a published recipe should know."""
    return f"recipe {name} ({PUBLISHED[name].found['by']}): {MARK}"


def for_model(model: str, shape: Callable[[], ModelShape]) -> str | None:
    """The name of the published recipe for a hub id or folder that bears a model's name, whoever owns it; or None.

    Args:
        model: its name.
        shape: of the model, which must have the recipe's sizes; called only if the name is known.

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
