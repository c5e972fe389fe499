"""Dense attention of one query per row, and the raw scores it is made of."""

from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_attention, check_pooling, check_query, placed
from saccade.kernels._dispatch import Implementation, choose_attention
from saccade.kernels._native.attention import attention
from saccade.kernels.dense_decode_scores import cpu, reference
from saccade.types import KVView, Pooling, Softmax


def dense_decode_scores(
    q: Tensor,
    kv: KVView,
    softmax: Softmax,
    *,
    pooling: Pooling | None = None,
    out: Tensor | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend to every token of each row; with a pooling, also return the scores (TidalDecode, selection layers).

    `out[b, h] = Σ_j softmax_j(q[b, h]·k[j]) v[j]`, softmax in float32. Query head `h` reads KV head
    `h // (Hq / Hkv)`. Slots outside a row's `[row_start, row_start + seq_len)` are never read.

    Args:
        q: queries `[B, Hq, d]`, floating point.
        kv: the layer's cache.
        softmax: what it makes of the scores.
        pooling: how query heads share a score (see `decode_scores`); None returns no scores.
        out: where the output goes, contiguous, q's dtype; None: memory of its own.
        implementation: "native", "cpu" and "triton" need what `decode_scores` says; "auto" takes the first that can
            run.

    Returns:
        The output `[B, Hq, dv]` in q's dtype, 0 of a row without tokens; and None, or the scores as `decode_scores`
        gives them, but undefined at and after `seq_lens[b]`: a loose bound on the lengths costs short rows nothing.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run.
    """
    check_attention("dense_decode_scores", q, kv, softmax, out)
    check_pooling("dense_decode_scores", pooling)
    chosen, kv = choose_attention("dense_decode_scores", implementation, q, kv)
    if chosen == "triton":
        from saccade.kernels._triton.attention import attend

        return attend(q, kv, softmax, out=out, pooling=pooling)
    if chosen == "native":
        result, scores = attention("dense_decode_scores", q, kv, softmax, pooling=pooling)
    else:
        run = cpu.dense_decode_scores if chosen == "cpu" else reference.dense_decode_scores
        result, scores = run(q, kv, softmax, pooling)
    return placed(result, out), scores


def decode_scores(q: Tensor, kv: KVView, *, pooling: Pooling, implementation: Implementation = "auto") -> Tensor:
    """Raw scores q·k of every token, unscaled, in float32 from the cached keys.

    Poolings over the g = Hq / Hkv query heads of a KV head: "max" is their largest score, "mean" the score of their
    mean query (ReSA, section 2.1; LycheeDecode, appendix F), "each" one score per query head
    (TidalDecode, section 3.1).

    Args:
        q: queries `[B, Hq, d]`, floating point.
        kv: the layer's cache.
        pooling: "max", "mean" or "each".
        implementation: "native" needs the library that the install builds where there is a C compiler, an unquantised
            float32 or bfloat16 cache on CPU whose last stride is 1 (of keys also the second, where a page has at least
            4 tokens: neighbouring tokens next to each other), a head dim that is a multiple of 16 up to 256 and at most
            32 query heads per KV head. "cpu" needs an unquantised float32, bfloat16 or float16 cache on CPU whose
            strides are multiples of the head dim with the last one 1. All but "reference" need values as wide as keys.
            "triton" needs Triton and a CUDA device, float32,
            bfloat16 or float16 queries, a cache of these or of float8_e4m3fn (compute capability 8.9) or float8_e5m2, a
            head dim up to 256, at most 64 KV heads and at most 32 query heads on each; any strides. "auto" takes the
            first that can run of these, else the reference.

    Returns:
        float32 `[B, G, max_len]` in logical order, G = Hkv or (for "each") Hq; -inf at and after `seq_lens[b]`.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run.
    """
    check_query("decode_scores", q, kv)
    if pooling is None:
        raise KernelError("decode_scores: pooling must be max, mean or each")
    check_pooling("decode_scores", pooling)
    chosen, kv = choose_attention("decode_scores", implementation, q, kv)
    if chosen == "triton":
        from saccade.kernels._triton.scoring import score

        return score(q, kv, pooling)
    if chosen == "native":
        _, scores = attention("decode_scores", q, kv, Softmax(1.0), pooling=pooling, attends=False)
        assert scores is not None
        return scores
    run = cpu.decode_scores if chosen == "cpu" else reference.decode_scores
    return run(q, kv, pooling)
