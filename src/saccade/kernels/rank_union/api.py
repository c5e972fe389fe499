"""LessIsMore's union: heads take turns, rank by rank."""

from __future__ import annotations

from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_integers
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._triton import availability
from saccade.kernels.rank_union import cpu, native, reference


def rank_union(
    ids: Tensor, counts: Tensor, limit: int, *, universe: int, implementation: Implementation = "auto"
) -> tuple[Tensor, Tensor]:
    """Merge the heads' ranked lists: all first choices, then all second choices, ... (LessIsMore, section 3.1.1).

    Within a rank the lower head goes first. The first occurrence of a position is kept, until `limit` distinct ones
    are found or the lists end.

    Args:
        ids: int32 `[B, Hq, M]`, each head's positions from its best down, -1 after the count.
        counts: int32 `[B, Hq]`.
        limit: the most positions to keep, at least 1.
        universe: every id is below it (the scores' width).
        implementation: "native" needs CPU tensors and the library that the install builds where there is a C compiler,
            "cpu" CPU tensors, "triton" CUDA tensors. "auto" takes the first that can run of these, else the reference.

    Returns:
        ids int32 `[B, 1, limit]` ascending, -1 after the count; counts int32 `[B, 1]`.

    Raises:
        KernelError: shapes or dtypes do not fit, a bound is below 1, or the requested implementation cannot run.
    """
    check_integers("rank_union", ids=ids, counts=counts)
    if ids.dim() != 3 or counts.shape != ids.shape[:2]:
        raise KernelError(
            f"rank_union: ids [B, Hq, M] and counts [B, Hq] do not fit: {list(ids.shape)}, {list(counts.shape)}"
        )
    if limit < 1 or universe < 1:
        raise KernelError(f"rank_union: limit and universe must be at least 1, got {limit} and {universe}")
    chosen = choose(
        "rank_union",
        implementation,
        {
            "native": lambda: native.refusal(ids, counts),
            "cpu": lambda: None if ids.is_cpu else f"the ids are on {ids.device}",
            "triton": lambda: availability.refusal(ids, counts),
        },
    )
    if chosen == "native":
        return native.rank_union(ids, counts, limit, universe)
    if chosen == "cpu":
        return cpu.rank_union(ids, counts, limit, universe)
    if chosen == "triton":
        from saccade.kernels.rank_union import triton

        return triton.rank_union(ids, counts, limit, universe)
    return reference.rank_union(ids, counts, limit, universe)
