"""LycheeCluster (Li et al., 2026, arXiv 2603.08453): chunks cut where the text breaks, found by bounds of clusters."""

from __future__ import annotations

from typing import Annotated

from ..plans.plan import Plan, dense_unless_told, layer_roles
from ..selection.clusters.selector import ClusterSelector
from ..types import ModelShape
from .method import Method
from .options import AtLeastOne, Budget, FirstDense, Options, RectifyField, Sinks, moved


class LycheeClusterOptions(Options):
    """Options of `lychee_cluster`: budget 1024, chunks of 8 to 16 tokens (appendix A)."""

    budget: Budget = 1024
    sinks: Sinks = 16
    buffer: AtLeastOne | None = None
    """text is indexed in steps of so many tokens, all attended to before; not given: min(128, budget / 4) or less"""
    replant: Annotated[AtLeastOne, moved("none", "lazy_clusters")] = 128
    """chunks that are clustered together, and anew when new ones come"""
    chunk_min: AtLeastOne = 8
    """fewest tokens of a chunk"""
    chunk_max: AtLeastOne = 16
    """most tokens of a chunk"""
    dense_layers: FirstDense = None
    rectify: RectifyField = None

    @property
    def selector(self) -> ClusterSelector:
        settings = self.model_dump(exclude={"dense_layers", "rectify"})
        return ClusterSelector(**settings, every=0 if self.rectify is None else self.rectify.every)


def plan(options: LycheeClusterOptions, shape: ModelShape) -> Plan:
    """Every layer behind the dense ones searches its own index of chunks, one set per KV head."""
    return Plan(options.selector, layer_roles(shape, dense_unless_told(shape, options.dense_layers)))


METHOD = Method(
    "lychee_cluster",
    "chunks cut where the text breaks, found through clusters of clusters",
    "LycheeCluster, arXiv 2603.08453",
    LycheeClusterOptions,
    plan,
)
