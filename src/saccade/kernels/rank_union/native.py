"""The union in C: walk the turns, mark what they name, and read the marks in order."""

import torch
from torch import Tensor

from saccade.kernels._native import library as native

_FAILURES = {1: "an id is below 0 or not below the universe", 2: "out of memory"}


def rank_union(ids: Tensor, counts: Tensor, limit: int, universe: int) -> tuple[Tensor, Tensor]:
    batch, heads, width = ids.shape
    merged = torch.empty((batch, 1, limit), dtype=torch.int32, device="cpu")
    found = torch.empty((batch, 1), dtype=torch.int32, device="cpu")
    # These must live until the call returns: it holds addresses.
    ranked, ends = ids.contiguous(), counts.contiguous()
    call = native.RankUnion.pack(
        *native.addresses(ranked, ends, merged, found),
        *(batch, heads, width, limit, universe, torch.get_num_threads()),
    )
    native.check("rank_union", native.loaded().saccade_rank_union(call), _FAILURES)
    return merged, found
