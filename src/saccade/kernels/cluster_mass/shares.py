"""From products with means to scores of tokens, in plain torch: fixed shapes, no host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._mass_tree import ChunkMeans, MassSettings, MassTree


def token_scores(
    products: Tensor, chunk_products: Tensor | None, q: Tensor, tree: MassTree, slots: Tensor, settings: MassSettings
) -> Tensor:
    """Scores `[B, G, width]` from q·m `[B, Hq, U]` of clusters and `[B, Hq, C]` of chunks, if these are the items."""
    width, sinks, scale, spread, each, reach = settings
    slots, heads = slots.long(), tree.sizes.shape[1]
    group = q.shape[1] // heads
    deviation = torch.linalg.vector_norm(q.float(), dim=-1).unflatten(1, (heads, group)) * q.shape[2] ** -0.5
    sizes = tree.sizes.index_select(0, slots)[:, :, None]
    logits = _logits(products, deviation * spread, tree.spreads.index_select(0, slots), scale)
    logits = torch.where(sizes > 0, logits + sizes.log(), -torch.inf)
    total = logits.logsumexp(-1, keepdim=True)
    # Where nothing is indexed all is -inf, and no share of it is anything.
    shares = torch.where(sizes > 0, (logits - total).exp(), 0.0)
    position = torch.arange(width, device=q.device)
    if tree.chunks is None:
        scores, owners = _pooled(shares, each), _at(tree.labels, slots, position)
        owners = tree.cluster_of(position, owners)
    else:
        assert chunk_products is not None, "the caller has seen to it"
        logits = _logits(chunk_products, deviation * (spread + 1), tree.chunks.spreads.index_select(0, slots), scale)
        scores, owners = _of_chunks(logits, total, shares, sizes, tree, tree.chunks, slots, each, reach)
        inside = position.clamp(max=owners.shape[-1] - 1)
        owners = owners.index_select(-1, inside)[:, None].expand(-1, heads, -1)
    if each:
        owners = owners.repeat_interleave(group, dim=1)
    ends = tree.ends.index_select(0, slots)[:, None]
    # Behind the last indexed token a label may be anything.
    found = scores.gather(-1, owners.clamp(0, scores.shape[-1] - 1))
    always = (position < sinks) | (position >= ends) | (ends == 0)
    return found.masked_fill(always[:, None], torch.inf)


def _logits(products: Tensor, deviation: Tensor, spreads: Tensor, scale: float) -> Tensor:
    """Of `[B, Hq, n]` products without their sizes, `[B, H, g, n]`."""
    inside: Tensor = products.unflatten(1, deviation.shape[1:]) + deviation[..., None] * spreads[:, :, None]
    return scale * inside


def _pooled(shares: Tensor, each: bool) -> Tensor:
    """Of a KV head, the sum over its query heads."""
    return shares.flatten(1, 2) if each else shares.sum(2)


def _at(table: Tensor, slots: Tensor, places: Tensor) -> Tensor:
    """What `[R, H, N]` has of each row's slot at `places`; beyond N whatever the last place has."""
    last = table.shape[-1] - 1
    return table[:, :, : len(places)].index_select(0, slots).index_select(-1, places.clamp(max=last))


def _of_chunks(
    logits: Tensor, total: Tensor, shares: Tensor, sizes: Tensor, tree: MassTree, chunks: ChunkMeans, slots: Tensor,
    each: bool, reach: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores of chunks `[B, G, C]`, -inf of those whose cluster is not kept; and owners int64 `[B, N]`."""
    edges = chunks.edges.index_select(0, slots)
    lengths = edges.diff(dim=1)[:, None, None]
    # An index of nothing has a total of -inf, which no share divides by.
    drawn = (logits + lengths.log() - total.clamp(min=torch.finfo(torch.float32).min)).exp()
    ranked = _pooled(shares, each)
    held = sizes.expand(-1, -1, shares.shape[2] if each else 1, -1).flatten(1, 2)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    tokens = held.gather(-1, order)
    kept = torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, order, tokens.cumsum(-1) - tokens < reach)
    labels = tree.labels.index_select(0, slots)
    clusters = tree.cluster_of(torch.arange(labels.shape[-1], device=labels.device), labels)
    if each:
        clusters = clusters.repeat_interleave(shares.shape[2], dim=1)
    count = drawn.shape[-1]
    inside = kept.gather(-1, clusters.clamp(0, kept.shape[-1] - 1))[..., :count]
    scores = torch.where(inside & (lengths[:, 0] > 0), _pooled(drawn, each), -torch.inf)
    return scores, chunks.owners.index_select(0, slots).long()
