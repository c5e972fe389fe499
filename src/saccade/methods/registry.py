"""The methods this package knows, each described once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import PolicyError
from ..plans.plan import Plan
from ..types import ModelShape
from . import composed, dense, exact_topk, less_is_more, lychee_cluster, lychee_decode, quest, resa, streaming, tidal
from .options import Options


@dataclass(frozen=True, slots=True)
class PolicyDescription:
    """What a policy is, where it comes from and which options it takes."""

    name: str
    summary: str
    source: str
    options: type[Options]
    plan: Callable[[Any, ModelShape], Plan]

    @property
    def defaults(self) -> dict[str, Any]:
        """Option names and their default values."""
        return {name: field.default for name, field in self.options.model_fields.items()}

    @property
    def help(self) -> dict[str, str]:
        """Option names and what they mean."""
        return {name: field.description or "" for name, field in self.options.model_fields.items()}


def _describe(*descriptions: PolicyDescription) -> Mapping[str, PolicyDescription]:
    return MappingProxyType({description.name: description for description in descriptions})


POLICIES: Mapping[str, PolicyDescription] = _describe(
    PolicyDescription("dense", "every head attends to every token: the baseline", "-", dense.DenseOptions, dense.plan),
    PolicyDescription(
        "streaming",
        "sinks and recent tokens only",
        "StreamingLLM, arXiv 2309.17453",
        streaming.StreamingOptions,
        streaming.plan,
    ),
    PolicyDescription(
        "quest",
        "the best pages by key bounds, in every layer",
        "Quest, arXiv 2406.10774",
        quest.QuestOptions,
        quest.plan,
    ),
    PolicyDescription(
        "tidal",
        "a few layers select tokens by exact scores, the others reuse them",
        "TidalDecode, arXiv 2410.05076",
        tidal.TidalOptions,
        tidal.plan,
    ),
    PolicyDescription(
        "less_is_more",
        "tidal's layers with one token set for all heads and a recent window",
        "LessIsMore, arXiv 2508.07101",
        less_is_more.LessIsMoreOptions,
        less_is_more.plan,
    ),
    PolicyDescription(
        "exact_topk",
        "the best tokens by exact scores, in every layer: slow, the measure of the others",
        "-",
        exact_topk.ExactTopKOptions,
        exact_topk.plan,
    ),
    PolicyDescription(
        "lychee_decode",
        "a few retrieval heads select tokens, the other heads reuse them",
        "LycheeDecode (Lin et al., 2026)",
        lychee_decode.LycheeDecodeOptions,
        lychee_decode.plan,
    ),
    PolicyDescription(
        "lychee_cluster",
        "chunks cut where the text breaks, found through clusters of clusters",
        "LycheeCluster (Li et al., 2026)",
        lychee_cluster.LycheeClusterOptions,
        lychee_cluster.plan,
    ),
    PolicyDescription(
        "resa",
        "a share of the pages by key bounds, with dense rectification",
        "ReSA, arXiv 2506.04108",
        resa.ReSAOptions,
        resa.plan,
    ),
    PolicyDescription(
        "composed",
        "any scorer with any rule and any roles",
        "-",
        composed.ComposedOptions,
        composed.plan,
    ),
)


def policies() -> Mapping[str, PolicyDescription]:
    """All policies by name: options, defaults, source. Iterating gives the names."""
    return POLICIES


def describe(name: str) -> PolicyDescription:
    """The description of policy `name`.

    Raises:
        PolicyError: if there is none; the message lists those there are.
    """
    try:
        return POLICIES[name]
    except KeyError:
        raise PolicyError(f"unknown policy {name!r}; valid: {', '.join(POLICIES)}") from None
