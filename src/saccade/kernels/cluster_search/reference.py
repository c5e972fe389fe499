"""Search of the cluster index in plain torch: fixed shapes, no host synchronisation, no pass over all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._chunk_sets import fill_budget, lay_out
from saccade.kernels._cluster_tree import ClusterTree, SearchWidths
from saccade.kernels._flat import flatten
from saccade.types import Selection

_LOWEST = torch.iinfo(torch.int64).min


def cluster_search(
    q: Tensor, tree: ClusterTree, seq_lens: Tensor, budget: int, sinks: int, units: int | None, widths: SearchWidths
) -> Selection:
    indexed = (tree.ends > 0) & (seq_lens > budget)
    head = torch.where(indexed, sinks, 0)
    tail = torch.where(indexed, tree.ends, 0)
    ranked, sizes = _ranked(q, tree, budget, units, widths)
    numbers, starts, lengths = _chunks(tree, ranked, sizes, widths.chunks)
    lengths = lengths * indexed[:, None, None]
    return fill_budget(numbers, starts, lengths, seq_lens, head=head, tail=tail, budget=budget, width=widths.tokens)


def _ranked(
    q: Tensor, tree: ClusterTree, budget: int, units: int | None, widths: SearchWidths
) -> tuple[Tensor, Tensor]:
    """The best clusters of the best units, `[B, H, n]`: where they lie and how many chunks they have."""
    batch, heads, _, head_dim = tree.centroids.shape
    query = q.float().reshape(batch, heads, -1, head_dim).mean(dim=2)
    norm = torch.linalg.vector_norm(query, dim=-1, keepdim=True)
    kept, sizes = _kept_units(query, norm, tree, budget, units)
    places = lay_out(kept, sizes, widths.clusters)
    absent = places < 0
    inside = places.clamp(min=0)
    flat = flatten(tree.centroids)
    corners = (
        torch.arange(batch, device=q.device)[:, None] * flat.page + torch.arange(heads, device=q.device) * flat.slot
    )
    rows = (inside * flat.head + corners[..., None]).flatten()
    near = flat.table.index_select(0, rows).view(batch, heads, widths.clusters, head_dim).float()
    bounds = _products(query, near) + norm * tree.radii.gather(-1, inside)
    numbers = tree.numbers.gather(-1, inside)
    # Unique keys, larger is better: the bound in the high half, the inverted number in the low half.
    keys = (_ordered(bounds) * 2**32 + (2**31 - 1 - numbers)).masked_fill(absent, _LOWEST)
    best = torch.topk(keys, min(widths.clusters, widths.chunks), dim=-1).indices
    ranked = inside.gather(-1, best)
    sizes = tree.offsets.gather(-1, ranked + 1) - tree.offsets.gather(-1, ranked)
    return ranked, sizes.long().masked_fill(absent.gather(-1, best), 0)


def _kept_units(
    query: Tensor, norm: Tensor, tree: ClusterTree, budget: int, units: int | None
) -> tuple[Tensor, Tensor]:
    """First cluster and number of clusters of every unit in order of its bound, no clusters where it is not kept."""
    bounds = _products(query, tree.unit_centroids.float()) + norm * tree.unit_radii
    order = bounds.masked_fill(tree.unit_tokens == 0, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    if units is None:
        tokens = tree.unit_tokens.gather(-1, order).long()
        kept = (tokens.cumsum(-1) - tokens < 4 * budget) & (tokens > 0)
    else:
        kept = (torch.arange(order.shape[-1], device=order.device) < units) & (tree.unit_tokens.gather(-1, order) > 0)
    first = tree.unit_offsets.gather(-1, order).long()
    return first, (tree.unit_offsets.gather(-1, order + 1) - first) * kept


def _chunks(tree: ClusterTree, ranked: Tensor, sizes: Tensor, chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, starts and lengths of the ranked clusters' first `chunks` chunks, `[B, H, chunks]`; length 0: none."""
    slots = lay_out(tree.offsets.gather(-1, ranked).long(), sizes, chunks)
    numbers = tree.members.gather(-1, slots.clamp(min=0)).long()
    edges = tree.edges[:, None].expand(-1, numbers.shape[1], -1)
    starts = edges.gather(-1, numbers).long()
    lengths = (edges.gather(-1, numbers + 1) - starts).masked_fill(slots < 0, 0)
    return numbers, starts, lengths


def _products(query: Tensor, vectors: Tensor) -> Tensor:
    """Inner products `[B, H, n]` of `[B, H, d]` and `[B, H, n, d]`; a product with a column would be 5 times slower."""
    return (query[:, :, None] @ vectors.transpose(-1, -2))[:, :, 0]


def _ordered(scores: Tensor) -> Tensor:
    """Integers that compare as the floats do; adding 0.0 makes -0.0 equal to 0.0."""
    bits = (scores + 0.0).view(torch.int32)
    # Larger bits of a negative number mean a smaller one: all but the sign are inverted.
    return (bits ^ ((bits >> 31) & (2**31 - 1))).long()
