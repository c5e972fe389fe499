"""Search of the cluster index in C: heaps instead of sorts, and only what the budget has room for is looked up."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._cluster_tree import ClusterTree
from saccade.kernels._native import library as native
from saccade.kernels._native.attention import ITEM_SIZE
from saccade.types import Selection

_FAILURES = {1: "the tree's offsets or members do not fit together", 2: "the shapes do not fit", 3: "out of memory"}


def refusal(q: Tensor, tree: ClusterTree, seq_lens: Tensor) -> str | None:
    """Why the library cannot take this call, or None."""
    if native.library() is None:
        return "no library was built at install (a C compiler is needed)"
    centroids = tree.centroids
    if centroids.dtype not in ITEM_SIZE or tree.unit_centroids.dtype != centroids.dtype:
        return f"the centroids are {centroids.dtype} and {tree.unit_centroids.dtype}, not both float32 or bfloat16"
    head_dim = centroids.shape[3]
    if head_dim % 16 or head_dim > native.MOST_DIM:
        return f"head dim {head_dim} is not a multiple of 16 up to {native.MOST_DIM}"
    if not (q.is_cpu and seq_lens.is_cpu and centroids.is_cpu):
        return f"the index is on {centroids.device}, or an argument elsewhere than on the CPU"
    tables = tree.tensors()
    if all(tensor.is_contiguous() for tensor in tables.values()):
        return None
    held = _held_heads(tree)
    apart = next((name for name, tensor in tables.items() if not _some_heads(tensor, held)), None)
    if apart is None:
        return None
    return f"{apart} is not a part of a contiguous tree: it has strides {tables[apart].stride()}"


def cluster_search(
    q: Tensor,
    tree: ClusterTree,
    seq_lens: Tensor,
    budget: int,
    sinks: int,
    units: int | None,
    clusters: int,
    chunks: int,
    tokens: int,
) -> Selection:
    batch, heads, held_clusters, head_dim = tree.centroids.shape
    ids = torch.empty((batch, heads, tokens), dtype=torch.int32)
    counts = torch.empty((batch, heads), dtype=torch.int32)
    # These must live until the call returns: it holds addresses.
    queries, lengths = q.float().contiguous(), seq_lens.contiguous()
    call = native.Search(
        queries.data_ptr(),
        tree.unit_centroids.data_ptr(),
        tree.centroids.data_ptr(),
        tree.unit_radii.data_ptr(),
        tree.radii.data_ptr(),
        tree.unit_offsets.data_ptr(),
        tree.unit_tokens.data_ptr(),
        tree.numbers.data_ptr(),
        tree.offsets.data_ptr(),
        tree.members.data_ptr(),
        tree.edges.data_ptr(),
        tree.ends.data_ptr(),
        lengths.data_ptr(),
        ids.data_ptr(),
        counts.data_ptr(),
        *(batch, q.shape[1], heads, _held_heads(tree), head_dim, ITEM_SIZE[tree.centroids.dtype] == 2),
        *(tree.unit_radii.shape[2], held_clusters, tree.members.shape[2]),
        *(budget, sinks, 0 if units is None else units),
        *(clusters, chunks, tokens, torch.get_num_threads(), native.widest),
    )
    found = native.library()
    assert found is not None, "refusal was asked"
    failure = found.saccade_cluster_search(ctypes.addressof(call))
    if failure:
        raise KernelError(f"cluster_search: {_FAILURES.get(failure, failure)}")
    return Selection(ids, counts)


def _held_heads(tree: ClusterTree) -> int:
    """Heads of the tree's storage: a tree of some heads is a view of one of all."""
    batch, heads, clusters = tree.radii.shape
    return heads if batch == 1 else tree.radii.stride(0) // clusters


def _some_heads(tensor: Tensor, held: int) -> bool:
    """Whether a tensor is contiguous but for heads of its storage that it leaves out."""
    if tensor.dim() < 3:
        return tensor.is_contiguous()
    return tensor[0].is_contiguous() and tensor.stride(0) == held * tensor.shape[2:].numel()
