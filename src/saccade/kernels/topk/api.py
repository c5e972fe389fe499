"""Exact top-k with a total order: two machines choose the same positions."""

from typing import Literal

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import NEIGHBOURS, check_integers
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._native import library
from saccade.kernels._share import Share
from saccade.kernels._triton import refusals
from saccade.kernels.topk import native, reference

Order = Literal["position", "score"]

_WIDEST = 2**21 - 1  # the Triton kernels count three kinds of a row's entries in 63 bits
_LAST = torch.iinfo(torch.int32).max


def topk(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    *,
    order: Order = "position",
    reserved: int = 0,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """The k highest scores among the first `lengths[b]` of each row; ties go to the lower position.

    Infinite scores take part like any other: +inf forces a position in, and -inf entries below the length fill up
    what is left, lower positions first. The result is undefined where a score is NaN.

    Args:
        scores: float32 `[B, G, N]`.
        lengths: int32 `[B]`, 0 to N + reserved: how many leading entries of a row may be chosen, and the reserved.
        k: how many, at least 1.
        reserved: by how much `lengths` exceed what may be chosen; nothing may where they are smaller.
        order: "position" sorts the chosen ascending, "score" from the best down (ties: lower position first).
        implementation: "native" needs CPU tensors and the library that the install builds where there is a C compiler,
            "triton" CUDA tensors and N below 2^21. "auto" takes the one that can run, else the reference.

    Returns:
        ids int32 `[B, G, min(k, N)]`, -1 after the count; counts int32 `[B, G]` = min(k, max(length - reserved, 0)).

    Raises:
        KernelError: shapes or dtypes do not fit, k < 1, reserved < 0, or the requested implementation cannot run.
    """
    if k < 1 or order not in ("position", "score"):
        raise KernelError(f"topk: k must be at least 1 and order position or score, got {k} and {order!r}")
    if reserved < 0:
        raise KernelError(f"topk: reserved must be at least 0, got {reserved}")
    chosen = _chosen("topk", scores, lengths, implementation)
    if chosen == "triton":
        from saccade.kernels.topk import triton

        with torch.cuda.device_of(scores):
            return triton.topk(scores, lengths, k, 0, reserved, 1, None, order == "score")
    candidates = (lengths - reserved).clamp(min=0) if reserved else lengths
    if chosen == "native":
        return native.topk(scores, candidates, k, 0, 1, None, order == "score")
    return reference.topk(scores, candidates, k, order)


def topk_and_last(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    last: int,
    *,
    unit: int = 1,
    share: Share | None = None,
    tiles: Tensor | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """The last entries of every row, whatever their scores, and the best of those before them, as `topk` ranks them.

    Decoding keeps the current token, or the last pages of a row, in every set (TidalDecode, section 3.1; ReSA, 2.1).

    Args:
        scores: float32 `[B, G, N]`.
        lengths: int32 `[B]`, 0 to N · unit: where each row ends, in tokens.
        k: how many others, at least 0.
        last: how many end a row, or all if it has fewer; at least 0.
        unit: tokens of an entry; the last one of a row may have fewer.
        share: how many of its entries a row's sets have at most, the last ones counted but never left out. None: no
            other bound than `k + last`.
        tiles: float32 `[B, G, ⌈N / NEIGHBOURS⌉]`, contiguous, at most the best of so many neighbours and reached by one
            of them: launches less on CUDA. Those that a row's last entries share are not looked at.
        implementation: as in `topk`.

    Returns:
        ids int32 `[B, G, min(k, N) + last]` ascending, -1 after the count; counts int32 `[B, G]`.

    Raises:
        KernelError: shapes or dtypes do not fit, k or last < 0, unit < 1, or the requested implementation cannot run.
    """
    if k < 0 or last < 0 or unit < 1:
        raise KernelError(f"topk_and_last: k and last must be at least 0, unit at least 1, got {k}, {last} and {unit}")
    chosen = _chosen("topk_and_last", scores, lengths, implementation)
    shape = (*scores.shape[:2], -(-scores.shape[2] // NEIGHBOURS))
    if tiles is not None and (tiles.shape != shape or not tiles.is_contiguous()):
        raise KernelError(f"topk_and_last: tiles {list(tiles.shape)} are not those of scores {list(scores.shape)}")
    if chosen == "triton":
        from saccade.kernels.topk import triton

        with torch.cuda.device_of(scores):
            return triton.topk(scores, lengths, k, last, 0, unit, share, False, tiles=tiles)
    if chosen == "native":
        return native.topk(scores, lengths, k, last, unit, share, False)
    units = lengths if unit == 1 else (lengths + (unit - 1)).div(unit, rounding_mode="floor")
    ends = units.clamp(max=last)
    others = units - ends
    ids, counts = reference.topk(scores, others, k, "score")
    if share is not None:
        counts = counts.minimum((share.of_each(units) - ends).clamp(min=0)[:, None])
    return best_and_last(ids, counts, others, ends, last)


def best_and_last(ranked: Tensor, take: Tensor, first: Tensor, last: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The sets of the first `take` `[B, G]` of each ranking `[B, G, R]` and of the units that end a row.

    Those are `first .. first + last` (int32 `[B]` each, `last` at most `width`), behind all that is ranked.

    Returns:
        ids int32 `[B, G, R + width]` ascending, -1 after the count; counts int32 `[B, G]`.
    """
    slot = torch.arange(ranked.shape[-1] + width, dtype=torch.int32, device=ranked.device)
    behind = slot - take[..., None]
    ids = torch.nn.functional.pad(ranked, (0, width)).masked_fill(behind >= 0, _LAST).sort(dim=-1).values
    merged = torch.where(behind < 0, ids, first[:, None, None] + behind)
    total = take + last[:, None]
    return torch.where(slot < total[..., None], merged, -1), total


def _chosen(operation: str, scores: Tensor, lengths: Tensor, implementation: Implementation) -> Implementation:
    """The implementation that runs, if scores and lengths fit."""
    check_integers(operation, lengths=lengths)
    if scores.dim() != 3 or scores.dtype != torch.float32 or scores.shape[2] < 1:
        raise KernelError(
            f"{operation}: scores must be float32 [B, G, N >= 1], got {scores.dtype} {list(scores.shape)}"
        )
    if lengths.shape != scores.shape[:1] or lengths.device != scores.device:
        raise KernelError(
            f"{operation}: lengths must be [{scores.shape[0]}] on {scores.device}, got {list(lengths.shape)}"
        )
    too_wide = f"it takes rows of at most {_WIDEST} scores, got {scores.shape[2]}"
    return choose(
        operation,
        implementation,
        native=lambda: library.refusal(scores, lengths),
        triton=lambda: refusals.refusal(scores, lengths) or (too_wide if scores.shape[2] > _WIDEST else None),
    )
