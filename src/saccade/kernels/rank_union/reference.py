"""The union in plain torch: each position's earliest turn, then the `limit` earliest of them."""

import torch
from torch import Tensor


def rank_union(ids: Tensor, counts: Tensor, limit: int, universe: int) -> tuple[Tensor, Tensor]:
    batch, heads, width = ids.shape
    ranks = torch.arange(width, device=ids.device)
    turns = ranks * heads + torch.arange(heads, device=ids.device)[:, None]
    never = heads * width
    # Padding goes to a column of its own, which is cut off again.
    target = ids.long().masked_fill(ranks >= counts[..., None], universe)
    earliest = torch.full((batch, universe + 1), never, device=ids.device)
    earliest.scatter_reduce_(1, target.flatten(1), turns.expand(batch, -1, -1).flatten(1), "amin")
    kept = torch.topk(earliest[:, :universe], min(limit, universe), dim=-1, largest=False)
    merged = kept.indices.masked_fill(kept.values == never, universe).sort(dim=-1).values
    merged = torch.nn.functional.pad(merged, (0, limit - merged.shape[1]), value=universe)
    found = (merged < universe).sum(dim=-1, keepdim=True)
    return merged.masked_fill(merged == universe, -1).int()[:, None], found.int()
