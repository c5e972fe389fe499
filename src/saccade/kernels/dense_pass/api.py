"""Dense attention of a few tokens at the end of every row, each over what lies before it."""

from dataclasses import replace

from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_attention
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._triton.refusals import attention_refusal
from saccade.kernels.dense_pass import cpu, reference
from saccade.types import KVView, Softmax


def dense_pass(q: Tensor, kv: KVView, softmax: Softmax, *, implementation: Implementation = "auto") -> Tensor:
    """Let each of a row's last n tokens attend to all tokens up to itself (rectification: ReSA, section 2.2).

    Token i of row b stands at position `p = seq_lens[b] - n + i`, and
    `out[b, i, h] = Σ_{j≤p} softmax_{j≤p}(q[b, h, i]·k[j]) v[j]`, softmax in float32. Query head `h` reads KV
    head `h // (Hq / Hkv)`. Slots outside a row's `[row_start, row_start + seq_len)` are never read.

    Args:
        q: queries `[B, Hq, n, d]` of each row's last n tokens, floating point.
        kv: the layer's cache, these tokens included.
        softmax: what it makes of the scores; its scale is above 0.
        implementation: "cpu", which is torch's own attention, needs an unquantised cache of q's dtype in which every
            row is one page, by strides, lengths that the host knows, and neither sinks nor a soft-cap; on a CUDA device
            it runs only what "triton" cannot. "triton" needs what `decode_scores` says, "reference" nothing. "auto"
            takes the first that can run of "cpu" and "triton", else the reference.

    Returns:
        `[B, n, Hq, dv]` in q's dtype; 0 where a row has fewer than n tokens and so no such position.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run.
    """
    if q.dim() != 4 or q.shape[2] < 1:
        raise KernelError(f"dense_pass: q must be [B, Hq, n, d] with n >= 1, got {list(q.shape)}")
    if not softmax.scale > 0:
        raise KernelError(f"dense_pass: scale must be above 0, got {softmax.scale}")
    first = q[:, :, 0]
    check_attention("dense_pass", first, kv, softmax)
    narrow = None if kv.v.shape[-1] == kv.head_dim else f"values are {kv.v.shape[-1]} wide, keys {kv.head_dim}"
    # Whole rows, or those that pad a batch, are none of its concern: every row attends to everything it has.
    plain = replace(kv, rows=replace(kv.rows, whole=None))

    def triton_refusal() -> str | None:
        return narrow or attention_refusal(first, plain)

    def cpu_refusal() -> str | None:
        if softmax.sinks is not None or softmax.cap is not None:
            return "torch's attention knows neither sinks nor soft-caps"
        if kv.k.dtype != q.dtype or kv.v.dtype != q.dtype:
            return f"q is {q.dtype}, the cache {kv.k.dtype} and {kv.v.dtype}"
        if kv.k_scale is not None or kv.v_scale is not None:
            return "the cache is quantised"
        if kv.rows.page_table.shape[1] != 1:
            return f"rows have {kv.rows.page_table.shape[1]} pages"
        if kv.k.device.type != "cpu" and kv.rows.bounds is None:
            return "the host does not know the lengths"
        if q.device.type != "cpu" and triton_refusal() is None:
            return f"the cache is on {kv.k.device}, where 'triton' runs"
        return None

    chosen = choose("dense_pass", implementation, cpu=cpu_refusal, triton=triton_refusal)
    kv = kv.in_rows()
    if chosen == "triton":
        from saccade.kernels.dense_pass import triton

        return triton.dense_pass(q, kv, softmax)
    return (cpu.dense_pass if chosen == "cpu" else reference.dense_pass)(q, kv, softmax)
