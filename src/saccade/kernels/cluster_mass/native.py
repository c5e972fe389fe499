"""Scores by attention mass on CPUs: C reads the means in place, which are nearly all that is read."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._mass_tree import MassSettings, MassTree
from saccade.kernels._native.attention import attention, native_refusal
from saccade.kernels.cluster_mass.shares import token_scores
from saccade.types import KVView, Rows, Softmax


def refusal(q: Tensor, tree: MassTree) -> str | None:
    """Why the library cannot take this call, or None."""
    if not q.is_cpu:
        return f"q is on {q.device}"
    slots = torch.zeros(q.shape[0], dtype=torch.int32, device="cpu")
    return native_refusal(q, _view(tree.means, slots, slots))


def cluster_mass(q: Tensor, tree: MassTree, slots: Tensor, seq_lens: Tensor, settings: MassSettings) -> Tensor:
    products = _products(q, tree.means, slots, tree.used(slots))
    chunks = None
    if tree.chunks is not None:
        chunks = _products(q, tree.chunks.means, slots, tree.chunks.counts.index_select(0, slots))
    return token_scores(products, chunks, q, tree, slots, settings)


def _products(q: Tensor, means: Tensor, slots: Tensor, counts: Tensor) -> Tensor:
    _, products = attention("cluster_mass", q, _view(means, slots, counts), Softmax(1.0), pooling="each", attends=False)
    assert products is not None, "they were asked for"
    return products


def _view(means: Tensor, slots: Tensor, counts: Tensor) -> KVView:
    """Means `[R, H, n, d]` as the keys of a cache of one page a slot; an empty one has a place that counts nothing."""
    keys = means.transpose(1, 2)
    return KVView(keys, keys, Rows(slots[:, None], torch.zeros_like(slots), counts.int().clamp(min=1), means.shape[2]))
