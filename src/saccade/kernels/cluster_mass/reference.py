"""Scores by attention mass in plain torch: fixed shapes, no host synchronisation."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels._mass_tree import MassSettings, MassTree
from saccade.kernels.cluster_mass.shares import token_scores


def cluster_mass(q: Tensor, tree: MassTree, slots: Tensor, seq_lens: Tensor, settings: MassSettings) -> Tensor:
    places = slots.long()
    chunks = None if tree.chunks is None else _products(q, tree.chunks.means.index_select(0, places))
    return token_scores(_products(q, tree.means.index_select(0, places)), chunks, q, tree, slots, settings)


def _products(q: Tensor, means: Tensor) -> Tensor:
    """q·m, float32 `[B, Hq, n]`, of `[B, Hq, d]` and `[B, H, n, d]`."""
    grouped = q.float().unflatten(1, (means.shape[1], -1))
    products: Tensor = grouped @ means.float().transpose(2, 3)
    return products.flatten(1, 2)
