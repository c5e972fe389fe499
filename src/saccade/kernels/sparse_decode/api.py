"""Decoding attention over a chosen set."""

from __future__ import annotations

from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_integers, check_query
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._flat import cpu_refusal
from saccade.kernels._native.attention import native_refusal
from saccade.kernels._triton.refusals import attention_refusal
from saccade.kernels.sparse_decode import cpu, native, reference
from saccade.types import KVView, Selection


def sparse_decode(
    q: Tensor, kv: KVView, selection: Selection, *, scale: float, implementation: Implementation = "auto"
) -> Tensor:
    """Attend to the selected tokens only: position-persistent sparse attention (TidalDecode, section 3.1).

    `out[b, h] = Σ_{j∈S(b,h)} softmax_{j∈S(b,h)}(scale · q[b, h]·k[j]) v[j]`, softmax in float32. A selection of
    `unit` n > 1 stands for the tokens `id·n .. id·n + n - 1` that lie below the row's length (ReSA, section 2.1).

    Args:
        q: queries `[B, Hq, d]`, floating point.
        kv: the layer's cache. Slots outside a row are never read.
        selection: ids int32 `[B, G, M]` in logical units, ascending, -1 after the counts; G is 1 (one set for all
            heads), Hkv or Hq. Every set holds at least one unit that starts below the row's length: an empty one
            has no defined output.
        scale: factor of the scores inside the softmax, usually `d ** -0.5`.
        implementation: "native" needs the library that the install builds where there is a C compiler, an unquantised
            float32 or bfloat16 cache on CPU whose last stride is 1 (of keys also the second, where a page has at least
            4 tokens: neighbouring tokens next to each other), a head dim that is a multiple of 16 up to 256 and at most
            32 query heads per KV head. "cpu" needs an unquantised float32, bfloat16 or float16 cache on CPU whose
            strides are multiples of the head dim with the last one 1. "triton" needs Triton and a CUDA device, float32,
            bfloat16 or float16 queries, a cache of these or of float8_e4m3fn (compute capability 8.9) or float8_e5m2, a
            head dim up to 256, at most 64 KV heads and at most 32 query heads on each; any strides. "auto" takes the
            first that can run of these, else the reference.

    Returns:
        `[B, Hq, d]` in q's dtype.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run.
    """
    check_query("sparse_decode", q, kv)
    check_integers("sparse_decode", ids=selection.ids, counts=selection.counts)
    ids = selection.ids
    if ids.dim() != 3 or ids.shape[0] != q.shape[0] or ids.shape[2] < 1:
        raise KernelError(f"sparse_decode: ids must be [B, G, M] with B {q.shape[0]}, M >= 1, got {list(ids.shape)}")
    if selection.groups not in (1, kv.kv_heads, q.shape[1]):
        raise KernelError(
            f"sparse_decode: {selection.groups} sets fit neither 1, {kv.kv_heads} KV heads nor {q.shape[1]} query heads"
        )
    if selection.counts.shape != ids.shape[:2] or selection.unit < 1:
        raise KernelError(
            f"sparse_decode: counts {list(selection.counts.shape)} or unit {selection.unit} do not fit the ids"
        )
    chosen = choose(
        "sparse_decode",
        implementation,
        {
            "native": lambda: native_refusal(q, kv, selection),
            "cpu": lambda: cpu_refusal(kv),
            "triton": lambda: attention_refusal(q, kv, selection),
        },
    )
    if chosen == "native":
        return native.sparse_decode(q, kv, selection, scale)
    if chosen == "cpu":
        return cpu.sparse_decode(q, kv, selection, scale)
    if chosen == "triton":
        from saccade.kernels.sparse_decode import triton

        return triton.sparse_decode(q, kv, selection, scale)
    return reference.sparse_decode(q, kv, selection, scale)
