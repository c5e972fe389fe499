"""The attention mass that sets of keys are expected to draw, as scores of their tokens."""

from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_integers
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._mass_tree import MassSettings, MassTree
from saccade.kernels._triton import refusals
from saccade.kernels.cluster_mass import native, reference


def cluster_mass(
    q: Tensor,
    tree: MassTree,
    slots: Tensor,
    seq_lens: Tensor,
    settings: MassSettings,
    *,
    implementation: Implementation = "auto",
) -> Tensor:
    """Scores of tokens: what share of attention the set of each draws if its keys spread evenly.

    For query head h and set j of n keys with mean m and spread s: `l = scale·(q·m + spread·|q|·s / √d) + ln n`, in
    float32, and its share is the softmax over all sets of l. A KV head's score is the sum over its query heads. First
    tokens, and what is behind the last one that is in a set, score +inf.

    Args:
        q: `[B, Hq, d]`, Hq a multiple of the tree's heads.
        tree: the index, of R slots.
        slots: int32 `[B]`, the slot of the tree that a row searches.
        seq_lens: int32 `[B]`, tokens per row, the current one included.
        settings: how they are scored.
        implementation: "native" needs CPU tensors, means in float32 or bfloat16, a head dim that is a multiple of 16 up
            to 256 and the library that the install builds where there is a C compiler; "triton" needs CUDA
            tensors. "auto" takes the first that can run of these, else the reference.

    Returns:
        float32 `[B, H or Hq, settings.width]`, undefined at and after `seq_lens[b]`.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run.
    """
    _check(q, tree, slots, seq_lens)
    chosen = choose(
        "cluster_mass",
        implementation,
        native=lambda: native.refusal(q, tree),
        triton=lambda: refusals.refusal(q, slots, seq_lens) or refusals.dtype_refusal("a tensor", q, tree.means),
    )
    if chosen == "triton":
        from saccade.kernels.cluster_mass import triton

        return triton.cluster_mass(q, tree, slots, seq_lens, settings)
    if chosen == "native":
        return native.cluster_mass(q, tree, slots, seq_lens, settings)
    return reference.cluster_mass(q, tree, slots, settings)


def _check(q: Tensor, tree: MassTree, slots: Tensor, seq_lens: Tensor) -> None:
    check_integers("cluster_mass", seq_lens=seq_lens, slots=slots)
    held, heads, _, head_dim = tree.means.shape
    batch = len(slots)
    if q.dim() != 3 or (q.shape[0], q.shape[2], *seq_lens.shape) != (batch, head_dim, batch) or q.shape[1] % heads:
        raise KernelError(
            f"cluster_mass: q must be [{batch}, a multiple of {heads}, {head_dim}] and seq_lens [{batch}], "
            f"got {list(q.shape)} and {list(seq_lens.shape)}"
        )
    if slots.is_cpu and ((slots < 0) | (slots >= held)).any():
        raise KernelError(f"cluster_mass: slots must be 0 to {held - 1}, got {slots.tolist()}")
