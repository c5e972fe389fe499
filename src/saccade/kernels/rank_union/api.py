"""LessIsMore's union: heads take turns, rank by rank."""

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_integers
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._native import library
from saccade.kernels._triton import refusals
from saccade.kernels.rank_union import native, reference

Rest = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Gives whole lists, ids `[B, Hq, M]` and counts `[B, Hq]`, of rows whose lengths it is told, empty ones where 0."""


def framed_rank_union(
    ids: Tensor,
    counts: Tensor,
    lengths: Tensor,
    limit: int,
    *,
    sinks: int,
    window: int,
    universe: int,
    rest: Rest | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """A row's first tokens, the union of the heads' ranked lists of those behind them, and its last ones.

    All first choices are merged, then all second choices, ...; within a rank the lower head goes first. The first
    occurrence of a position is kept, until `limit` distinct ones are found or the lists end (LessIsMore, sections 3.1.1
    and 3.1.2). Of a row that fits all its tokens are the set, whatever its lists say; ids must be valid there too.

    Args:
        ids: int32 `[B, Hq, M]`, each head's positions from its best down, -1 after the count; they count from the token
            behind the sinks and lie before the window.
        counts: int32 `[B, Hq]`.
        limit: the most positions to keep, at least 1.
        universe: every id is below it (the scores' width).
        implementation: "native" needs CPU tensors and the library that the install builds where there is a C compiler,
            "triton" CUDA tensors. "auto" takes the one that can run, else the reference.
        lengths: int32 `[B]`, the rows' tokens.
        sinks: how many first tokens, at least 0; all of a shorter row.
        window: how many last tokens, at least 0; what the sinks leave of a shorter row.
        rest: where `ids` are the best of longer lists: gives these, of the rows whose union falls short of the limit
            and that have no room for all their tokens; it gets int32 `[B]`, their lengths, 0 for the other rows. These
            lists begin with `ids`. On CUDA it is asked in any case, and of which rows is known on the device alone.

    Returns:
        ids int32 `[B, 1, sinks + limit + window]` ascending, -1 after the count; counts int32 `[B, 1]`.

    Raises:
        KernelError: shapes or dtypes do not fit, a bound is too small, or the requested implementation cannot run.
    """
    check_integers("framed_rank_union", lengths=lengths)
    if lengths.shape != ids.shape[:1] or lengths.device != ids.device or sinks < 0 or window < 0:
        raise KernelError(
            f"framed_rank_union: lengths must be [{ids.shape[0]}] on {ids.device}, sinks and window at least 0, "
            f"got {list(lengths.shape)} on {lengths.device}, {sinks} and {window}"
        )
    check_integers("framed_rank_union", ids=ids, counts=counts)
    if ids.dim() != 3 or counts.shape != ids.shape[:2]:
        raise KernelError(
            f"framed_rank_union: ids [B, Hq, M] and counts [B, Hq] do not fit: {list(ids.shape)}, {list(counts.shape)}"
        )
    if limit < 1 or universe < 1:
        raise KernelError(f"framed_rank_union: limit and universe must be at least 1, got {limit} and {universe}")
    chosen = choose(
        "framed_rank_union",
        implementation,
        native=lambda: library.refusal(ids, counts),
        triton=lambda: refusals.refusal(ids, counts),
    )
    if chosen == "triton":
        from saccade.kernels.rank_union import triton

        with torch.cuda.device_of(ids):
            return triton.rank_union(ids, counts, limit, universe, lengths, sinks, window, rest)
    union = native.rank_union if chosen == "native" else reference.rank_union
    merged, found = union(ids, counts, limit, universe)
    short = (found < limit) & (lengths > sinks + limit + window)[:, None]
    if rest is not None and not (short.is_cpu and not short.any()):
        more, numbers = union(*rest(lengths * short[:, 0]), limit, universe)
        merged, found = torch.where(short[..., None], more, merged), torch.where(short, numbers, found)
    return framed(merged, found, lengths, sinks, window)


def framed(chosen: Tensor, counts: Tensor, lengths: Tensor, sinks: int, window: int) -> tuple[Tensor, Tensor]:
    """Sinks, then `chosen` `[B, 1, M]`, then the last `window` tokens, which never overlap however short the row.

    `chosen` counts from the first token behind the sinks. A row that fits is all there is, whatever was chosen.
    """
    lengths = lengths[:, None]
    fits = lengths <= sinks + chosen.shape[-1] + window
    counts = counts.masked_fill(fits, 0)
    sink_counts = torch.where(fits, lengths, lengths.clamp(max=sinks))
    total = sink_counts + counts + (lengths - sink_counts).clamp(max=window)
    slot = torch.arange(sinks + chosen.shape[-1] + window, dtype=torch.int32, device=lengths.device)[None]
    middle = slot - sink_counts
    recent = lengths - total + slot
    picked = (
        chosen[:, 0].gather(-1, middle.clamp(0, max(chosen.shape[-1] - 1, 0)).long()) if chosen.shape[-1] else middle
    )
    ids = torch.where(slot < sink_counts, slot, torch.where(middle < counts, picked + sinks, recent))
    return torch.where(slot < total, ids, -1)[:, None], total
