"""Sets of tokens for attention mass: which tokens are alike."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ...kernels.spherical_kmeans.api import spherical_kmeans

ITERATIONS = 4
"""Of k-means: 10 instead of 3 held .001 or .002 more of attention on two models (docs/log.md)."""


def alike(tokens: Tensor, counts: Tensor, clusters: int, made: Tensor) -> Tensor:
    """Labels int64 `[P, W]` of the first `counts` `[P]` of float32 `[P, W, d]`, in `made` `[P]` of `clusters`.

    The tokens behind must be zeros. Keys are compared by direction from their mean: what all have in common moves no
    softmax, and would make all alike.
    """
    # In two steps: a GPU adds up many in parts, whose number depends on what else is added up.
    total = tokens.unflatten(1, (-1, gcd(tokens.shape[1], 64))).sum(2).sum(1, keepdim=True)
    away = tokens - total / counts.clamp(min=1)[:, None, None]
    lengths = torch.linalg.vector_norm(away, dim=-1, keepdim=True)
    away.div_(torch.where(lengths > 0, lengths, 1.0))
    labels, _ = spherical_kmeans(away, clusters, counts=counts, cluster_counts=made, iterations=ITERATIONS)
    return labels
