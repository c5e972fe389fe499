"""The union in C: walk the turns, mark what they name, and read the marks in order."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._native import library as native

_FAILURES = {1: "an id is below 0 or not below the universe", 2: "out of memory"}


def refusal(ids: Tensor, counts: Tensor) -> str | None:
    """Why the library cannot take this call, or None."""
    if native.library() is None:
        return "no library was built at install (a C compiler is needed)"
    if not (ids.is_cpu and counts.is_cpu):
        return f"the ids are on {ids.device}, the counts on {counts.device}"
    return None


def rank_union(ids: Tensor, counts: Tensor, limit: int, universe: int) -> tuple[Tensor, Tensor]:
    batch, heads, width = ids.shape
    merged = torch.empty((batch, 1, limit), dtype=torch.int32)
    found = torch.empty((batch, 1), dtype=torch.int32)
    # These must live until the call returns: it holds addresses.
    ranked, ends = ids.contiguous(), counts.contiguous()
    call = native.RankUnion(
        *(ranked.data_ptr(), ends.data_ptr(), merged.data_ptr(), found.data_ptr()),
        *(batch, heads, width, limit, universe, torch.get_num_threads()),
    )
    library = native.library()
    assert library is not None, "refusal was asked"
    failure = library.saccade_rank_union(ctypes.addressof(call))
    if failure:
        raise KernelError(f"rank_union: {_FAILURES.get(failure, failure)}")
    return merged, found
