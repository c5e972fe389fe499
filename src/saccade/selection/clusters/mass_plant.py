"""Planting groups of items for attention mass: which are alike, and what the keys of those are on average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels._kmeans import member_sums, within
from ...kernels.spherical_kmeans.api import spherical_kmeans


@dataclass(frozen=True, slots=True)
class Means:
    """Of n sets of tokens in each of P problems.

    Attributes:
        means: float32 `[P, n, d]`, of their keys; zeros where a set is empty.
        spreads: float32 `[P, n]`, root of the mean squared distance of the keys from it.
        sizes: int64 `[P, n]`, tokens.
    """

    means: Tensor
    spreads: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, tokens: Tensor, labels: Tensor, count: int) -> Means:
        """Of float32 `[P, W, d]` by label int64 `[P, W]`, where `count` is none."""
        sums, sizes = member_sums(tokens, labels, count)
        there = sizes.clamp(min=1)
        means = sums / there[..., None]
        inside = labels.clamp(max=count - 1)[..., None].expand(-1, -1, tokens.shape[2])
        distances = (tokens - means.gather(1, inside)).square().sum(-1, keepdim=True)
        squares, _ = member_sums(distances, labels, count)
        return cls(means, (squares[..., 0] / there).sqrt(), sizes)


@dataclass(frozen=True, slots=True)
class PlantedMass:
    """What planting finds of P groups: `labels` of items `[P, S]`, `clusters`, and `chunks` if these are the items."""

    labels: Tensor
    clusters: Means
    chunks: Means | None


def plant_mass(
    tokens: Tensor, owners: Tensor | None, items: int, counts: Tensor, clusters: int, made: Tensor, iterations: int
) -> PlantedMass:
    """Cluster the first `counts` `[P]` of S `items` into the first `made` `[P]` of `clusters`.

    Keys `tokens` are float32 `[P, W, d]`; `owners` int64 `[P, W]` are the chunks of the tokens, S of one in none, where
    items are chunks. Items are compared by direction from the group's mean: what all keys have in common moves no
    softmax, and would make all of them alike.
    """
    chunks = None if owners is None else Means.of(tokens, owners, items)
    vectors = tokens if chunks is None else chunks.means
    present = within(counts, items)[..., None]
    center = (vectors * present).sum(1, keepdim=True) / counts.clamp(min=1)[:, None, None]
    away = torch.where(present, vectors - center, 0.0)
    lengths = torch.linalg.vector_norm(away, dim=-1, keepdim=True)
    away = away / torch.where(lengths > 0, lengths, 1.0)
    labels, _ = spherical_kmeans(away, clusters, counts=counts, cluster_counts=made, iterations=iterations)
    of_tokens = labels
    if owners is not None:
        of_tokens = torch.nn.functional.pad(labels, (0, 1), value=clusters).gather(1, owners)
    return PlantedMass(labels, Means.of(tokens, of_tokens, clusters), chunks)
