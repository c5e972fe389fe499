"""Sets of tokens for attention mass: which tokens are alike, and what the keys of a set are on average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels._kmeans import member_sums, within
from ...kernels.spherical_kmeans.api import spherical_kmeans

ITERATIONS = 4
"""Of k-means: 10 instead of 3 held .001 or .002 more of attention on two models (docs/log.md)."""


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
        away = means.gather(1, labels.clamp(max=count - 1)[..., None].expand(-1, -1, tokens.shape[2]))
        squares, _ = member_sums(away.sub_(tokens).square_().sum(-1, keepdim=True), labels, count)
        return cls(means, (squares[..., 0] / there).sqrt(), sizes)


def alike(tokens: Tensor, counts: Tensor, clusters: int, made: Tensor) -> Tensor:
    """Labels int64 `[P, W]` of the first `counts` `[P]` of float32 `[P, W, d]`, in `made` `[P]` of `clusters`.

    Keys are compared by direction from their mean: what all have in common moves no softmax, and would make all alike.
    """
    present = within(counts, tokens.shape[1])[..., None]
    center = (tokens * present).sum(1, keepdim=True) / counts.clamp(min=1)[:, None, None]
    away = torch.where(present, tokens - center, 0.0)
    lengths = torch.linalg.vector_norm(away, dim=-1, keepdim=True)
    away = away / torch.where(lengths > 0, lengths, 1.0)
    labels, _ = spherical_kmeans(away, clusters, counts=counts, cluster_counts=made, iterations=ITERATIONS)
    return labels
