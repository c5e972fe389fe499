"""LycheeCluster (Li et al., 2026): chunks cut where the text breaks, found through two levels of clusters by bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..plans.plan import Plan, selection_layers
from ..plans.roles import RoleMap
from ..selection.clusters.selector import ClusterSelector
from ..types import ModelShape, Role
from .options import Budget, DenseLayers, Options, RectifyField, Sinks, Whole


class LycheeClusterOptions(Options):
    """Options of `lychee_cluster`: budget 1024, chunks of 8 to 16 tokens, 2 chunks a cluster (appendix A)."""

    budget: Budget = 1024
    sinks: Sinks = 16
    buffer: Annotated[Whole, Field(ge=1)] | None = None
    """new tokens, all attended to, before they are cut into chunks; not given: min(128, budget / 4), shrunk to fit"""
    chunk_min: Annotated[Whole, Field(ge=1)] = 8
    """fewest tokens of a chunk"""
    chunk_max: Annotated[Whole, Field(ge=1)] = 16
    """most tokens of a chunk"""
    chunking: Literal["text", "fixed"] = "text"
    """cut chunks where the text has its strongest delimiter, or all at chunk_max tokens (figure 6)"""
    pooling: Literal["mean", "max"] = "mean"
    """mean or max: how a chunk's keys become one (table 3)"""
    cluster_size: Annotated[Whole, Field(ge=1, le=8)] = 2
    """chunks per fine cluster (appendix E)"""
    coarse: Literal["sqrt", "cap64", "root"] = "sqrt"
    """sqrt: as many coarse units as the root of the clusters, at most 64; root: without that limit; cap64: 64"""
    k_g: Annotated[Whole, Field(ge=1)] | None = None
    """coarse units that a search keeps; not given: as many as hold 4 budgets of tokens"""
    radius: Literal["chunks", "children"] = "chunks"
    """chunks: a coarse unit's radius covers the chunks below, so its bound holds; children: centroids, as published"""
    pack: Literal["chunks", "whole"] = "chunks"
    """chunks: a full buffer is cut like a prompt; whole: it becomes one chunk (algorithm 1)"""
    dense_layers: DenseLayers = 2
    rectify: RectifyField = None

    @property
    def selector(self) -> ClusterSelector:
        settings = self.model_dump(exclude={"dense_layers", "rectify"})
        return ClusterSelector(**settings, every=0 if self.rectify is None else self.rectify.every)

    @model_validator(mode="after")
    def _cuts(self) -> LycheeClusterOptions:
        # The selector knows what fits its budget and says so.
        _ = self.selector
        return self


def plan(options: LycheeClusterOptions, shape: ModelShape) -> Plan:
    """Every layer behind the dense ones searches its own index of chunks, one set per KV head."""
    first = selection_layers("lychee_cluster", shape, options.dense_layers, ())[0][0]
    roles = (Role.DENSE if layer < first else Role.SELECT for layer in range(shape.layers))
    return Plan(options.selector, RoleMap.by_layer(roles, shape.kv_heads))
