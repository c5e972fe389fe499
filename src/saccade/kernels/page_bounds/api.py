"""Page bounds of Quest and ReSA: kept up to date from the cache, and scored."""

from __future__ import annotations

from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_integers, check_pooling
from saccade.kernels._dispatch import Implementation, choose, use_cpu
from saccade.kernels._flat import cpu_refusal
from saccade.kernels.page_bounds import cpu, native, reference
from saccade.types import KVView, Pooling


def update_page_bounds(
    lower: Tensor,
    upper: Tensor,
    kv: KVView,
    *,
    page: int,
    start: Tensor,
    count: int,
    implementation: Implementation = "auto",
) -> None:
    """Recompute, in place, the bounds of every page that positions `start .. start + count - 1` touch.

    A page's bounds are the elementwise minimum and maximum of its keys (ReSA, section 2.1). They are taken from the
    cache, never updated from the old ones: keys that rectification has rewritten leave no trace. Pages are aligned
    to each row's logical position 0 and cover only tokens below its length; positions beyond it touch nothing.
    Bounds of untouched pages keep their values.

    Args:
        lower, upper: `[B, Hkv, P, d]` in the cache's dtype, with `P · page >= max_len`; written.
        kv: the layer's cache.
        page: tokens per page.
        start: int32 `[B]`, first changed logical position of each row.
        count: how many positions changed, the same for all rows, at least 0.
        implementation: "cpu" needs an unquantised float32, bfloat16 or float16 cache on CPU whose strides are
            multiples of the head dim with the last one 1; "auto" takes it then, else the reference.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run.
    """
    check_integers("update_page_bounds", start=start)
    expected = (kv.rows.batch, kv.kv_heads, lower.shape[2] if lower.dim() == 4 else 0, kv.head_dim)
    if lower.shape != expected or upper.shape != expected:
        raise KernelError(
            f"update_page_bounds: bounds must be [B, Hkv, P, d] for {kv.rows.batch} rows, {kv.kv_heads} heads of "
            f"{kv.head_dim}, got {list(lower.shape)} and {list(upper.shape)}"
        )
    if lower.dtype != kv.k.dtype or upper.dtype != kv.k.dtype:
        raise KernelError(f"update_page_bounds: bounds must be {kv.k.dtype}, got {lower.dtype} and {upper.dtype}")
    if page < 1 or count < 0 or lower.shape[2] * page < kv.rows.max_len:
        raise KernelError(
            f"update_page_bounds: {lower.shape[2]} pages of {page} cannot hold {kv.rows.max_len} tokens (count {count})"
        )
    if start.shape != (kv.rows.batch,):
        raise KernelError(f"update_page_bounds: start must be [{kv.rows.batch}], got {list(start.shape)}")
    if count == 0:
        return
    if use_cpu("update_page_bounds", implementation, cpu_refusal(kv)):
        cpu.update_page_bounds(lower, upper, kv, page, start, count)
    else:
        reference.update_page_bounds(lower, upper, kv, page, start, count)


def page_scores(
    q: Tensor,
    lower: Tensor,
    upper: Tensor,
    seq_lens: Tensor,
    *,
    page: int,
    pooling: Pooling,
    implementation: Implementation = "auto",
) -> Tensor:
    """An upper bound of q·k over each page: `Σ_j max(q_j·upper_j, q_j·lower_j)`, unscaled, in float32.

    Computed as `q⁺·upper + q⁻·lower` with the positive and negative parts of q (ReSA, section 2.1, after Quest).
    "max" takes the largest bound of a group's query heads, "mean" the bound of their mean query (it is not linear:
    the query is pooled first), "each" one bound per query head.

    Args:
        q: queries `[B, Hq, d]`, floating point.
        lower, upper: `[B, Hkv, P, d]` as `update_page_bounds` keeps them. Pages at and after the row's last one are
            not read.
        seq_lens: int32 `[B]`; a row of length 0 has no page.
        page: tokens per page.
        pooling: "max", "mean" or "each".
        implementation: "native" needs the library that the install builds where there is a C compiler, float32 or
            bfloat16 bounds on CPU whose last stride is 1, a head dim that is a multiple of 16 up to 256 and at most 32
            query heads per KV head. "cpu" needs CPU tensors. "auto" takes the first that can run of these, else the
            reference.

    Returns:
        float32 `[B, G, P]`, G = Hkv or (for "each") Hq; -inf at and after page ⌈seq_len / page⌉.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run.
    """
    check_integers("page_scores", seq_lens=seq_lens)
    check_pooling("page_scores", pooling)
    if q.dim() != 3 or lower.dim() != 4 or lower.shape != upper.shape or not q.is_floating_point():
        raise KernelError(
            f"page_scores: q [B, Hq, d] and bounds [B, Hkv, P, d] do not fit: {list(q.shape)}, {list(lower.shape)}, "
            f"{list(upper.shape)}"
        )
    if q.shape[0] != lower.shape[0] or q.shape[2] != lower.shape[3] or q.shape[1] % lower.shape[1]:
        raise KernelError(f"page_scores: q {list(q.shape)} does not match bounds {list(lower.shape)}")
    if seq_lens.shape != q.shape[:1] or page < 1 or pooling is None:
        raise KernelError("page_scores: seq_lens must be [B], page at least 1 and pooling max, mean or each")
    chosen = choose(
        "page_scores",
        implementation,
        {
            "native": lambda: native.refusal(q, lower, upper, seq_lens),
            "cpu": lambda: None if lower.is_cpu else f"the bounds are on {lower.device}",
        },
    )
    if chosen == "native":
        return native.page_scores(q, lower, upper, seq_lens, page, pooling)
    if chosen == "cpu":
        return cpu.page_scores(q, lower, upper, seq_lens, page, pooling)
    return reference.page_scores(q, lower, upper, seq_lens, page, pooling)
