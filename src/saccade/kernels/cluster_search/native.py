"""Search of the cluster index in C: heaps instead of sorts, and only what the budget has room for is looked up."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._cluster_tree import ClusterTree, SearchWidths
from saccade.kernels._native import library as native
from saccade.kernels._native.attention import ITEM_SIZE, readable, vectors_refusal
from saccade.types import Selection

_FAILURES = {1: "the tree's offsets or members do not fit together", 2: "the shapes do not fit", 3: "out of memory"}


def refusal(q: Tensor, tree: ClusterTree, seq_lens: Tensor) -> str | None:
    """Why the library cannot take this call, or None."""
    centroids = tree.centroids
    unfit = vectors_refusal("the centroids", centroids, tree.unit_centroids)
    if unfit is not None:
        return unfit
    if not (q.is_cpu and seq_lens.is_cpu and centroids.is_cpu):
        return f"the index is on {centroids.device}, or an argument elsewhere than on the CPU"
    # Nearly always, and sooner found.
    if all(tensor.is_contiguous() for tensor in tree.tensors().values()):
        return None
    apart = tree.apart()
    return None if apart is None else f"{apart}: it is not a part of a contiguous tree"


def cluster_search(
    q: Tensor, tree: ClusterTree, slots: Tensor | None, seq_lens: Tensor, budget: int, sinks: int, widths: SearchWidths
) -> Selection:
    batch, (_, heads, held_clusters, head_dim) = q.shape[0], tree.centroids.shape
    ids = torch.empty(batch, heads, widths.tokens, dtype=torch.int32, device="cpu")
    counts = torch.empty(batch, heads, dtype=torch.int32, device="cpu")
    # These must live until the call returns: it holds addresses.
    queries, lengths = readable(q), seq_lens.contiguous()
    places = None if slots is None else slots.contiguous()
    call = native.Search.pack(
        *native.addresses(queries, tree.unit_centroids, tree.centroids, tree.unit_radii, tree.radii),
        *native.addresses(tree.unit_offsets, tree.unit_tokens, tree.numbers, tree.offsets, tree.members),
        *native.addresses(tree.edges, tree.ends, places, lengths, ids, counts),
        *(batch, q.shape[1], heads, tree.stored_heads, head_dim),
        *(ITEM_SIZE[tree.centroids.dtype] == 2, queries.dtype == torch.bfloat16),
        *(tree.unit_radii.shape[2], held_clusters, tree.members.shape[2], tree.edges.shape[1]),
        *(budget, sinks),
        *(*widths, torch.get_num_threads(), native.widest),
    )
    native.check("cluster_search", native.loaded().saccade_cluster_search(call), _FAILURES)
    return Selection(ids, counts)
