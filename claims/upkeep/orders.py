"""A search of the cluster index that takes a cluster's chunks in any order: slow, one row, to compare the orders."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lab.whole_tree import WholeTreeLayer
from saccade.kernels.chunk_keys.api import chunk_keys
from saccade.selection.clusters.index import ClusterLayer
from saccade.selection.clusters.settings import ClusterSettings
from saccade.selection.clusters.tree import ClusterTree
from saccade.types import KVView, Selection

from .names import Order


def search(index: ClusterLayer | WholeTreeLayer, q: Tensor, kv: KVView, order: Order) -> Selection:
    """The set of every KV head for the query `[1, Hq, d]`, as `index.search` but for the order."""
    settings, length = index.settings, int(kv.rows.seq_lens[0])
    tree = index.tree
    end = int(tree.ends[0])
    if end == 0 or length <= settings.budget:
        ids = torch.arange(length, dtype=torch.int32).expand(1, kv.kv_heads, -1)
        return Selection(ids, torch.full((1, kv.kv_heads), length, dtype=torch.int32))
    edges = tree.edges[0].tolist()
    edges = edges[: edges.index(end) + 1]
    query = q[0].double().unflatten(0, (kv.kv_heads, -1)).mean(dim=1)
    near = None
    if order == "query":
        cut = tree.edges[:, : len(edges)]
        near = chunk_keys((kv,), cut, longest=settings.chunk_max, pooling=settings.pooling)[0, 0]
    sets = []
    for head in range(kv.kv_heads):
        room = settings.budget - settings.sinks - (length - end)
        chosen = [*range(settings.sinks), *range(end, length)]
        for chunk in _chunks(tree, head, query[head], settings, order, None if near is None else near[head]):
            room -= edges[chunk + 1] - edges[chunk]
            if room < 0:
                break
            chosen += range(edges[chunk], edges[chunk + 1])
        sets.append(torch.tensor(sorted(chosen), dtype=torch.int32))
    counts = torch.tensor([[len(held) for held in sets]], dtype=torch.int32)
    return Selection(pad_sequence(sets, batch_first=True, padding_value=-1)[None], counts)


def largest_cluster(index: ClusterLayer | WholeTreeLayer) -> float:
    """The largest share of all chunks that one cluster of a head holds; 0 without chunks."""
    tree = index.tree
    # Room for groups to come holds zeros, to which the last offsets fall.
    sizes = tree.offsets[0].diff(dim=1).clamp(min=0)
    return float((sizes.amax(dim=1) / sizes.sum(dim=1).clamp(min=1)).max())


def _chunks(
    tree: ClusterTree, head: int, query: Tensor, settings: ClusterSettings, order: Order, near: Tensor | None
) -> list[int]:
    """All chunks of the clusters below the best units, from the best cluster down."""
    tokens = tree.unit_tokens[0, head].tolist()
    bounds = _bounds(tree.unit_centroids[0, head], tree.unit_radii[0, head], query)
    units = sorted((unit for unit in range(len(tokens)) if tokens[unit]), key=lambda unit: (-bounds[unit], unit))
    of_unit, of_cluster = tree.unit_offsets[0, head].tolist(), tree.offsets[0, head].tolist()
    clusters, held = list[int](), 0
    for unit in units:
        if held >= 4 * settings.budget:
            break
        clusters += range(of_unit[unit], of_unit[unit + 1])
        held += tokens[unit]
    numbers = tree.numbers[0, head].tolist()
    bounds = _bounds(tree.centroids[0, head], tree.radii[0, head], query)
    clusters.sort(key=lambda cluster: (-bounds[cluster], numbers[cluster]))
    members, chunks = tree.members[0, head].tolist(), list[int]()
    score = [] if near is None else (near.double() @ query).tolist()
    for cluster in clusters:
        own = members[of_cluster[cluster] : of_cluster[cluster + 1]]
        if order == "position":
            own.sort()
        elif order == "query":
            own.sort(key=lambda chunk: -score[chunk])
        chunks += own
    return chunks


def _bounds(centroids: Tensor, radii: Tensor, query: Tensor) -> list[float]:
    """Upper bounds on q·k of what lies below each node (LycheeCluster, equation 2)."""
    bounds: list[float] = (centroids.double() @ query + query.norm() * radii.double()).tolist()
    return bounds
