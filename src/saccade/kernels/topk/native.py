"""Exact top-k in C: one pass over each row collects what reaches a sampled floor, a bisection finds the cut."""

import torch
from torch import Tensor

from saccade.kernels._native import library as native
from saccade.kernels._share import Share

_FAILURES = {1: "a length is below 0 or above the width of the scores", 2: "the shapes do not fit", 3: "out of memory"}


def topk(
    scores: Tensor, lengths: Tensor, k: int, last: int, unit: int, share: Share | None, ranked: bool
) -> tuple[Tensor, Tensor]:
    """The best `k` before the `last` entries of each row, from the best down if `ranked`, and these last entries.

    `lengths` are in tokens, `unit` of them to an entry; a set has at most its `share` of the row's entries.
    """
    batch, groups, width = scores.shape
    kept = min(k, width)
    ids = torch.empty(batch, groups, kept + last, dtype=torch.int32, device="cpu")
    counts = torch.empty(batch, groups, dtype=torch.int32, device="cpu")
    # These must live until the call returns: it holds addresses.
    rows = scores if scores.stride(2) == 1 else scores.contiguous()
    ends = lengths.contiguous()
    call = native.TopK.pack(
        *native.addresses(rows, ends, ids, counts),
        *(rows.stride(0) * 4, rows.stride(1) * 4, batch, groups, width, kept, last),
        *(ranked, unit, *((0, 0, 0) if share is None else (share.numerator, share.denominator, share.minimum))),
        *(torch.get_num_threads(), native.widest),
    )
    native.check("topk", native.loaded().saccade_topk(call), _FAILURES)
    return ids, counts
