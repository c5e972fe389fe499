"""Clusters of single tokens, ranked by attention mass: ours; the unit is ClusterKV's (Liu et al., arXiv 2412.03213)."""

from typing import Annotated

from pydantic import Field

from ..selection.clusters.mass_selector import TokenSelector
from .method import Method, every_layer
from .options import AtLeastOne, Budget, FirstDense, Heads, Options, RectifyField, Sinks, Spread


class TokenClustersOptions(Options):
    """Options of `token_clusters`."""

    budget: Budget = 1024
    sinks: Sinks = 16
    buffer: AtLeastOne | None = None
    """tokens are clustered in steps of so many, a power of two, all attended to before; not given: up to 128"""
    cluster_size: Annotated[AtLeastOne, Field(ge=4, le=32)] = 8
    """tokens of a cluster, on average: 4, 8, 16 or 32; 16 reads half as much"""
    group: Annotated[AtLeastOne, Field(ge=128, le=8192)] = 2048
    """tokens that are clustered together, a power of two"""
    spread: Spread = 2.0
    """standard deviations above its mean that a cluster's q·k is taken to be"""
    heads: Heads = "kv"
    """a set per KV head or per query head"""
    dense_layers: FirstDense = None
    rectify: RectifyField = None

    @property
    def selector(self) -> TokenSelector:
        settings = self.model_dump(exclude={"dense_layers", "rectify"})
        return TokenSelector(**settings, every=0 if self.rectify is None else self.rectify.every)


METHOD = Method(
    "token_clusters",
    "clusters of single tokens, ranked by the attention mass that they should draw",
    "-",
    TokenClustersOptions,
    every_layer,
)
