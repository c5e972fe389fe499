"""Scores by attention mass on CPUs: C reads the means in place, which are nearly all that is read."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._mass_tree import MassSettings, MassTree
from saccade.kernels._native.attention import attention, native_refusal
from saccade.kernels._token_shares import token_scores
from saccade.types import KVView, Rows, Softmax


def refusal(q: Tensor, tree: MassTree) -> str | None:
    """Why the library cannot take this call, or None."""
    if not q.is_cpu:
        return f"q is on {q.device}"
    return native_refusal(q, _view(tree, torch.zeros(q.shape[0], dtype=torch.int32, device="cpu")))


def cluster_mass(q: Tensor, tree: MassTree, slots: Tensor, settings: MassSettings) -> Tensor:
    _, products = attention("cluster_mass", q, _view(tree, slots), Softmax(1.0), pooling="each", attends=False)
    assert products is not None, "they were asked for"
    return token_scores(products, q, tree, slots, settings)


def _view(tree: MassTree, slots: Tensor) -> KVView:
    """Means as the keys of a cache of one page a slot; an empty one has a place that counts nothing."""
    keys, counts = tree.means.transpose(1, 2), tree.used.index_select(0, slots).clamp(min=1)
    return KVView(keys, keys, Rows(slots[:, None], torch.zeros_like(slots), counts, keys.shape[1]))
