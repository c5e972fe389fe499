"""Decoding attention over a chosen set."""

from torch import Tensor

from saccade.kernels._checks import check_attention, check_selection, placed
from saccade.kernels._dispatch import Implementation, choose_attention
from saccade.kernels._native.attention import attention
from saccade.kernels.sparse_decode import cpu, reference
from saccade.types import KVView, Selection, Softmax, Workspace


def sparse_decode(
    q: Tensor,
    kv: KVView,
    selection: Selection,
    softmax: Softmax,
    *,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Attend to the selected tokens only: position-persistent sparse attention (TidalDecode, section 3.1).

    `out[b, h] = Σ_{j∈S(b,h)} softmax_{j∈S(b,h)}(q[b, h]·k[j]) v[j]`, softmax in float32. A selection of
    `unit` n > 1 stands for the tokens `id·n .. id·n + n - 1` that lie below the row's length (ReSA, section 2.1).

    Args:
        q: queries `[B, Hq, d]`, floating point.
        kv: the layer's cache. Slots outside a row are never read. A row of `rows.whole` attends to all its tokens
            instead of its set ("triton" and "reference" only); the output of a row of length 0 is 0.
        selection: ids int32 `[B, G, M]` in logical units, ascending, -1 after the counts; G is 1 (one set for all
            heads), Hkv or Hq. Every other row's set holds at least one unit that starts below its length: an empty
            one has no defined output.
        softmax: what it makes of the scores.
        out: where the output goes, contiguous, q's dtype; None: memory of its own.
        workspace: with which "triton" needs one launch, not two.
        implementation: "native", "cpu" and "triton" need what `decode_scores` says; "auto" takes the first that can
            run.

    Returns:
        `[B, Hq, dv]` in q's dtype.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run.
    """
    check_attention("sparse_decode", q, kv, softmax, out)
    check_selection("sparse_decode", q, kv, selection)
    chosen, kv = choose_attention("sparse_decode", implementation, q, kv, selection)
    if chosen == "triton":
        from saccade.kernels._triton.attention import attend

        return attend(q, kv, softmax, out=out, selection=selection, workspace=workspace)[0]
    if chosen == "native":
        return placed(attention("sparse_decode", q, kv, softmax, selection=selection)[0], out)
    return placed((cpu if chosen == "cpu" else reference).sparse_decode(q, kv, selection, softmax), out)
