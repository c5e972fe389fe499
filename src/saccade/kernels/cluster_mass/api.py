"""The attention mass that clusters of keys are expected to draw, as scores of their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_integers
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._mass_tree import MassTree
from saccade.kernels._triton import refusals
from saccade.kernels.cluster_mass import reference


def cluster_mass(
    products: Tensor,
    q: Tensor,
    tree: MassTree,
    slots: Tensor,
    seq_lens: Tensor,
    *,
    width: int,
    sinks: int,
    scale: float,
    spread: float,
    each: bool = False,
    chunk_products: Tensor | None = None,
    reach: int = 0,
    implementation: Implementation = "auto",
) -> Tensor:
    """Scores of tokens: what share of attention the cluster, or the chunk, of each draws if its keys spread evenly.

    For query head h and cluster j of n keys with mean m and spread s: `l = scale·(q·m + spread·|q|·s / √d) + ln n`, and
    its share is softmax over j of l (`../shared/CLUSTER.md` of the project's plan, section 3). A KV head's score is the
    sum over its query heads. First tokens and what is in no cluster yet score +inf, and so does all of a row of which
    nothing is indexed.

    With chunks, clusters are taken by score (ties: the lower) until they hold `reach` tokens; the score of a chunk in
    them is the same formula of the chunk, with one more `spread`, as a share of what the clusters draw; of others -inf.

    Args:
        products: float32 `[B, Hq, U]`, q·m of the clusters; undefined of those behind a row's last one.
        q: `[B, Hq, d]`, Hq a multiple of the tree's heads.
        tree: the index, of R slots.
        slots: int32 `[B]`, the slot of the tree that a row searches.
        seq_lens: int32 `[B]`, tokens per row, the current one included.
        width: tokens for which there are scores, a host bound on `seq_lens`.
        sinks: first tokens, which are in no cluster.
        scale: factor of q·k in the softmax.
        spread: how many standard deviations above its mean a cluster's q·k is taken to be.
        each: scores per query head instead of per KV head.
        chunk_products: float32 `[B, Hq, C]`, likewise of the chunks; given if and only if the tree has some.
        reach: tokens that the kept clusters hold at least.
        implementation: "triton" needs CUDA tensors and a tree of single tokens. "auto" takes it where it can run, else
            the reference.

    Returns:
        float32 `[B, H or Hq, width]`, undefined at and after `seq_lens[b]`.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run.
    """
    _check(products, q, tree, slots, seq_lens, chunk_products)
    chosen = choose(
        "cluster_mass",
        implementation,
        triton=lambda: (
            refusals.refusal(products, q, slots, seq_lens, tree.means)
            or (None if tree.chunks is None else "its items are chunks")
        ),
    )
    if chosen == "triton":
        from saccade.kernels.cluster_mass import triton

        return triton.cluster_mass(products, q, tree, slots, seq_lens, width, sinks, scale, spread, each)
    return reference.cluster_mass(
        products, q, tree, slots, seq_lens, width, sinks, scale, spread, each, chunk_products, reach
    )


def _check(
    products: Tensor, q: Tensor, tree: MassTree, slots: Tensor, seq_lens: Tensor, chunk_products: Tensor | None
) -> None:
    check_integers("cluster_mass", seq_lens=seq_lens, slots=slots)
    held, heads, count, head_dim = tree.means.shape
    batch = len(slots)
    if q.dim() != 3 or q.shape[0] != batch or q.shape[1] % heads or q.shape[2] != head_dim or seq_lens.shape != (batch,):
        raise KernelError(
            f"cluster_mass: q must be [{batch}, a multiple of {heads}, {head_dim}] and seq_lens [{batch}], "
            f"got {list(q.shape)} and {list(seq_lens.shape)}"
        )
    if products.dtype != torch.float32 or products.shape != (batch, q.shape[1], count):
        raise KernelError(
            f"cluster_mass: products must be float32 [{batch}, {q.shape[1]}, {count}], "
            f"got {products.dtype} {list(products.shape)}"
        )
    if (chunk_products is None) != (tree.chunks is None):
        raise KernelError("cluster_mass: chunk_products must be given if and only if the tree has chunks")
    if slots.is_cpu and ((slots < 0) | (slots >= held)).any():
        raise KernelError(f"cluster_mass: slots must be 0 to {held - 1}, got {slots.tolist()}")
