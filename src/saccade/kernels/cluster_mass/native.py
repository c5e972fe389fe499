"""Scores by attention mass in C: products with the means, which are nearly all that is read, then shares and tokens."""

import torch
from torch import Tensor

from saccade.kernels._mass_tree import MassSettings, MassTree
from saccade.kernels._native import library as native
from saccade.kernels._native.attention import attention, native_refusal
from saccade.types import KVView, Rows, Softmax

_FAILURES = {1: "a slot is none of the tree's", 2: "out of memory"}


def refusal(q: Tensor, tree: MassTree) -> str | None:
    """Why the library cannot take this call, or None."""
    if not q.is_cpu:
        return f"q is on {q.device}"
    return native_refusal(q, _view(tree, torch.zeros(q.shape[0], dtype=torch.int32, device="cpu")))


def cluster_mass(q: Tensor, tree: MassTree, slots: Tensor, seq_lens: Tensor, settings: MassSettings) -> Tensor:
    _, products = attention("cluster_mass", q, _view(tree, slots), Softmax(1.0), pooling="each", attends=False)
    assert products is not None, "they were asked for"
    (batch, query_heads, dim), (held, heads, places) = q.shape, tree.sizes.shape
    width, sinks, scale, spread, each = settings
    scores = torch.empty(batch, query_heads if each else heads, width, dtype=torch.float32, device="cpu")
    # These must live until the call returns: it holds addresses. Sizes and spreads lie alike, sets in a row.
    queries, placed, lengths = q.float().contiguous(), slots.contiguous(), seq_lens.contiguous()
    sizes, spreads, labels = tree.sizes, tree.spreads, tree.labels
    assert sizes.stride() == spreads.stride() and sizes.stride(2) == labels.stride(2) == 1, "a tree lies so"
    call = native.Mass.pack(
        *native.addresses(products, queries, placed, lengths, sizes, spreads, labels, tree.ends, tree.used, scores),
        *(scale, spread),
        *(*sizes.stride()[:2], *labels.stride()[:2], labels.element_size(), labels.shape[2], held),
        *(batch, heads, query_heads // heads, dim, places, width, sinks, tree.tokens, tree.sets, each),
        *(torch.get_num_threads(), native.widest),
    )
    native.check("cluster_mass", native.loaded().saccade_token_mass(call), _FAILURES)
    return scores


def _view(tree: MassTree, slots: Tensor) -> KVView:
    """Means as the keys of a cache of one page a slot; an empty one has a place that counts nothing."""
    keys, counts = tree.means.transpose(1, 2), tree.used.index_select(0, slots).clamp(min=1)
    return KVView(keys, keys, Rows(slots[:, None], torch.zeros_like(slots), counts, keys.shape[1]))
