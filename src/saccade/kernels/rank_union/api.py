"""LessIsMore's union: heads take turns, rank by rank."""

from __future__ import annotations

from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_integers
from saccade.kernels._dispatch import Implementation, use_cpu
from saccade.kernels.rank_union import cpu, reference


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
        implementation: "cpu" needs CPU tensors; "auto" takes it then, else the reference.

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
    refusal = None if ids.device.type == "cpu" else f"the ids are on {ids.device}"
    if use_cpu("rank_union", implementation, refusal):
        return cpu.rank_union(ids, counts, limit, universe)
    return reference.rank_union(ids, counts, limit, universe)
