"""Spherical k-means in plain torch, step by step: first centroids, refilling of empty clusters, averages of members."""

import torch
from torch import Tensor

Sizes = tuple[Tensor, Tensor]
"""How many vectors and clusters each problem has, int64 `[H]`."""


def within(counts: Tensor, width: int) -> Tensor:
    """Which of `width` places each count `[H]` has, `[H, width]`."""
    return torch.arange(width, device=counts.device) < counts[:, None]


def first_centroids(vectors: Tensor, clusters: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Vectors floor(i * n / l) of the first n of `[H, N, d]`, zeros from centroid l on; which there are, `[H, L]`."""
    counts, made = sizes[0][:, None], sizes[1][:, None]
    present = within(sizes[1], clusters)
    chosen = torch.arange(clusters, device=vectors.device) * counts // made.clamp(min=1) * present
    first = vectors.gather(1, chosen[..., None].expand(-1, -1, vectors.shape[2]))
    return first.masked_fill(~present[..., None], 0.0), present


def refill(labels: Tensor, own: Tensor, present: Tensor) -> Tensor:
    """Labels `[H, N]` after every empty cluster has taken a vector, given inner products `own` `[H, N]`.

    Only clusters that are `present` `[H, L]` take one; a vector with label L is none, whatever its product.
    Vectors are taken in ascending order of `own`, but never the last one left of a cluster: that is the last of its
    cluster in this order. So all takings are known at once, without a loop.
    """
    heads, count = labels.shape
    clusters = present.shape[1]
    # Adding 0.0 makes -0.0 equal to 0.0 for sorts that look at bits.
    order = (own + 0.0).sort(dim=1, stable=True).indices
    ranked = labels.gather(1, order)
    places = torch.arange(count, device=labels.device).expand(heads, -1)
    last = ranked.new_full((heads, clusters + 1), -1).scatter_reduce_(1, ranked, places, "amax")
    spare = (last.gather(1, ranked) != places) & (ranked < clusters)
    empty = (last[:, :clusters] < 0) & present
    turn = spare.long().cumsum(1) - 1
    # The empty clusters in index order, then (where there are fewer) a column that nobody reads.
    slots = torch.where(empty, empty.long().cumsum(1) - 1, clusters)
    numbers = torch.arange(clusters, device=labels.device).expand(heads, -1)
    waiting = ranked.new_zeros((heads, clusters + 1)).scatter_(1, slots, numbers)
    taken = spare & (turn < empty.sum(1, keepdim=True))
    target = waiting.gather(1, turn.clamp(min=0, max=clusters))
    return torch.empty_like(labels).scatter_(1, order, torch.where(taken, target, ranked))


def averaged(vectors: Tensor, labels: Tensor, old: Tensor) -> Tensor:
    """Normalised sums of each cluster's members `[H, L, d]`; `old` where the sum is zero."""
    sums, _ = member_sums(vectors, labels, old.shape[1])
    lengths = torch.linalg.vector_norm(sums, dim=-1, keepdim=True)
    return torch.where(lengths > 0, sums / lengths, old)


def member_sums(vectors: Tensor, labels: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Sums `[H, L, d]` and numbers int64 `[H, L]` of the vectors with each label. No atomics: sorted sums."""
    heads, count, head_dim = vectors.shape
    ranked, order = labels.sort(dim=1, stable=True)
    numbers = torch.arange(clusters + 2, device=labels.device).expand(heads, -1).contiguous()
    # Vectors with label L, which are none, are one more segment.
    sizes = torch.searchsorted(ranked, numbers).diff(dim=1)
    rows = order + torch.arange(0, heads * count, count, device=labels.device)[:, None]
    members = vectors.reshape(-1, head_dim).index_select(0, rows.flatten())
    sums = torch.segment_reduce(members, "sum", lengths=sizes.flatten(), axis=0, initial=0.0, unsafe=True)
    return sums.view(heads, clusters + 1, head_dim)[:, :clusters], sizes[:, :clusters]
