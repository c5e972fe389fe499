"""Scores by attention mass in plain torch, for any device."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels._mass_tree import MassSettings, MassTree
from saccade.kernels._token_shares import token_scores


def cluster_mass(q: Tensor, tree: MassTree, slots: Tensor, settings: MassSettings) -> Tensor:
    means = tree.means.index_select(0, slots.long()).float()
    products = q.float().unflatten(1, (means.shape[1], -1)) @ means.transpose(2, 3)
    return token_scores(products.flatten(1, 2), q, tree, slots, settings)
