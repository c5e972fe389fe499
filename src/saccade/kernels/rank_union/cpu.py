"""The union on CPU: walk the turns in order instead of searching the whole universe."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_union(ids: Tensor, counts: Tensor, limit: int, universe: int) -> tuple[Tensor, Tensor]:
    batch, heads, width = ids.shape
    never = heads * width
    present = torch.arange(width, device="cpu")[:, None] < counts[:, None]
    in_turn = ids.transpose(1, 2).long().masked_fill(~present, universe).flatten(1)
    turns = torch.arange(never, dtype=torch.int32, device="cpu").expand(batch, -1)
    earliest = torch.full((batch, universe + 1), never, dtype=torch.int32, device="cpu")
    earliest.scatter_reduce_(1, in_turn, turns, "amin")
    earliest[:, universe] = never
    first = earliest.gather(1, in_turn) == turns
    merged = torch.full((batch, 1, limit), -1, dtype=torch.int32, device="cpu")
    found = []
    for row in range(batch):
        kept = in_turn[row][first[row]][:limit].sort().values
        merged[row, 0, : kept.shape[0]] = kept
        found.append([kept.shape[0]])
    return merged, torch.tensor(found, dtype=torch.int32, device="cpu")
