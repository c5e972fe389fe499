"""Attention of a layer whose heads differ: some attend to all tokens, the others to their sets."""

from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_attention, check_pooling, check_selection, placed
from saccade.kernels._dispatch import Implementation, choose_attention
from saccade.kernels._native.attention import Heads, attention
from saccade.kernels.hybrid_decode import parts
from saccade.types import Flags, KVView, Pooling, Selection, Softmax


def hybrid_decode(
    q: Tensor,
    kv: KVView,
    selection: Selection,
    dense: Flags,
    softmax: Softmax,
    *,
    pooling: Pooling | None = None,
    scored: Flags | None = None,
    out: Tensor | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Dense and sparse heads of one layer as one operation (LycheeDecode, appendix C).

    A KV head flagged in `dense` gives what `dense_decode_scores` gives, another what `sparse_decode` gives for its
    set. A dense head costs as much as its row is long, a sparse one as its set: "native" and "triton" cut the work of
    all rows and heads together into spans of about equal size, so that no thread or multiprocessor ends up with the
    dense heads.

    Args:
        q: queries `[B, Hq, d]`, floating point.
        kv: the layer's cache. Slots outside a row are never read; rows of `rows.whole` as in `sparse_decode`.
        selection: ids int32 `[B, G, M]` as in `sparse_decode`, G 1, Hkv or Hq. The sets of dense heads are not looked
            at: they may be empty or hold anything.
        dense: for each of the Hkv KV heads whether it attends to all tokens; constants on the host.
        softmax: what it makes of the scores.
        pooling: how query heads share a score (see `decode_scores`); None returns no scores.
        scored: for each KV head whether its scores are wanted, which only dense ones have; None with a pooling is all
            dense ones.
        out: where the output goes, contiguous, q's dtype; None: memory of its own.
        implementation: "native" and "triton" need what `decode_scores` says. "cpu" and "reference" call the two
            operations of that name for each run of neighbouring heads. "auto" takes the first that can run.

    Returns:
        The output `[B, Hq, dv]` in q's dtype; and None, or the raw scores of the Hs heads flagged in `scored` in their
        order, float32 `[B, Hs, max_len]` or (for "each") `[B, Hs · Hq / Hkv, max_len]`, undefined at
        and after `seq_lens[b]`.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, scores of a sparse head are wanted, or the requested
            implementation cannot run.
    """
    check_attention("hybrid_decode", q, kv, softmax, out)
    check_pooling("hybrid_decode", pooling)
    check_selection("hybrid_decode", q, kv, selection)
    wanted = _check_flags(kv.kv_heads, dense, pooling, scored)
    chosen, kv = choose_attention("hybrid_decode", implementation, q, kv, selection)
    if chosen == "native":
        heads = Heads.of(dense, wanted)
        result, scores = attention("hybrid_decode", q, kv, softmax, pooling=pooling, selection=selection, heads=heads)
        return placed(result, out), scores
    if chosen == "triton":
        from saccade.kernels._triton.attention import attend

        return attend(q, kv, softmax, out=out, selection=selection, dense=dense, pooling=pooling, scored=wanted)
    result, scores = parts.hybrid_decode(q, kv, selection, dense, softmax, pooling, wanted, chosen)
    return placed(result, out), scores


def _check_flags(kv_heads: int, dense: Flags, pooling: Pooling | None, scored: Flags | None) -> Flags:
    """The flags of the heads whose scores are kept."""
    if len(dense) != kv_heads:
        raise KernelError(f"hybrid_decode: dense flags {len(dense)} heads, the cache has {kv_heads}")
    if scored is None:
        return dense if pooling is not None else (False,) * kv_heads
    if len(scored) != kv_heads:
        raise KernelError(f"hybrid_decode: scored flags {len(scored)} heads, the cache has {kv_heads}")
    if pooling is None and any(scored):
        raise KernelError("hybrid_decode: scores need a pooling: max, mean or each")
    sparse = [head for head in range(kv_heads) if scored[head] and not dense[head]]
    if sparse:
        raise KernelError(f"hybrid_decode: scored flags head {sparse[0]}, which is not dense and has no scores")
    return scored
