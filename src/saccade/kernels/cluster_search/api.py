"""Search of the cluster index: the best chunks by upper bounds on q·k (LycheeCluster, section 4.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_integers
from saccade.kernels._cluster_tree import ClusterTree, SearchWidths
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._triton import refusals
from saccade.kernels.cluster_search import native, reference
from saccade.types import Selection


def cluster_search(
    q: Tensor,
    tree: ClusterTree,
    seq_lens: Tensor,
    *,
    budget: int,
    sinks: int,
    widths: SearchWidths,
    slots: Tensor | None = None,
    implementation: Implementation = "auto",
) -> Selection:
    """The set of each KV head: sinks, chunks found by bounds, what is in no chunk yet, and the current token.

    The query is the mean of its group. A unit's or cluster's bound is q·centroid + |q|·radius, in float32. Units are
    taken by bound (ties: the lower), the smallest number whose chunks hold 4 budgets of tokens; their clusters by
    bound (ties: the lower number); a cluster's chunks as they lie, until the next one does not fit.
    Rows of at most `budget` tokens, and rows that are not indexed, get all their tokens.

    Args:
        q: `[B, Hq, d]`, Hq a multiple of the tree's heads.
        tree: the index, of R slots.
        seq_lens: int32 `[B]`, tokens per row, the current one included.
        budget: tokens of a set.
        sinks: first tokens, in every set; the first chunk starts behind them.
        widths: host bounds; `tokens` gives the result its shape.
        slots: int32 `[B]`, the slot of the tree that a row searches; None: that of its own number.
        implementation: "native" needs the library that the install builds where there is a C compiler, a tree on CPU
            that is contiguous or some heads of a contiguous one, centroids in float32 or bfloat16 and a head dim that
            is a multiple of 16 up to 256; "triton" CUDA tensors. "auto" takes the first that can run of these, else the
            reference.

    Returns:
        Tokens int32 `[B, H, widths.tokens]`, ascending, and their counts.

    Raises:
        KernelError: shapes, dtypes or numbers do not fit, or the requested implementation cannot run.
    """
    _check(q, tree, slots, seq_lens, budget, widths)
    chosen = choose(
        "cluster_search",
        implementation,
        native=lambda: native.refusal(q, tree, seq_lens),
        triton=lambda: refusals.refusal(q, seq_lens, *tree.tensors().values()),
    )
    if chosen == "native":
        return native.cluster_search(q, tree, slots, seq_lens, budget, sinks, widths)
    if slots is None:
        slots = torch.arange(tree.ends.shape[0], dtype=torch.int32, device=q.device)
    if chosen == "triton":
        from saccade.kernels.cluster_search import triton

        return triton.cluster_search(q, tree, slots, seq_lens, budget, sinks, widths)
    return reference.cluster_search(q, tree, slots, seq_lens, budget, sinks, widths)


def _check(
    q: Tensor, tree: ClusterTree, slots: Tensor | None, seq_lens: Tensor, budget: int, widths: SearchWidths
) -> None:
    check_integers("cluster_search", seq_lens=seq_lens, **({} if slots is None else {"slots": slots}))
    held, heads, _, head_dim = tree.centroids.shape
    batch = held if slots is None else slots.numel()
    if q.dim() != 3 or q.shape[0] != batch or q.shape[2] != head_dim or q.shape[1] % heads or not q.is_floating_point():
        raise KernelError(
            f"cluster_search: q must be floating point [{batch}, a multiple of {heads}, {head_dim}], "
            f"got {q.dtype} {list(q.shape)}"
        )
    rows = (seq_lens,) if slots is None else (seq_lens, slots)
    devices = {tensor.device for tensor in (*rows, q, tree.centroids)}
    if seq_lens.shape != (batch,) or (slots is not None and slots.shape != (batch,)) or len(devices) > 1:
        raise KernelError(
            f"cluster_search: q, seq_lens [{batch}], slots and the index must be on one device, "
            f"got {', '.join(map(str, devices))} and seq_lens {list(seq_lens.shape)}"
        )
    if slots is not None and slots.is_cpu and ((slots < 0) | (slots >= held)).any():
        raise KernelError(f"cluster_search: slots must be 0 to {held - 1}, got {slots.tolist()}")
    if budget < 1 or min(widths) < 1:
        raise KernelError(f"cluster_search: budget and widths must be at least 1, got {budget} and {tuple(widths)}")
