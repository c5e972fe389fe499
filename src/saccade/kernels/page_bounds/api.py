"""Page bounds of Quest and ReSA: kept up to date from the cache, and scored."""

from typing import Any

from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._checks import check_integers, check_pooling
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels._stored_bounds import Stored
from saccade.kernels._triton import refusals
from saccade.kernels.page_bounds import native, reference
from saccade.types import KVView, Pooling

_MOST_DIM = 512
"""Largest head dim that a Triton program holds a page's bounds of."""


def update_page_bounds(
    lower: Tensor,
    upper: Tensor,
    kv: KVView,
    *,
    page: int,
    start: Tensor,
    count: int,
    table: Tensor | None = None,
    filled: bool = False,
    implementation: Implementation = "auto",
) -> None:
    """Recompute, in place, the bounds of every page that positions `start .. start + count - 1` touch.

    A page's bounds are the elementwise minimum and maximum of its keys (ReSA, section 2.1). They are taken from the
    cache, never updated from the old ones: keys that rectification has rewritten leave no trace. Pages are aligned
    to each row's logical position 0 and cover only tokens below its length; positions beyond it touch nothing.
    Bounds of untouched pages keep their values. Those of a quantised cache are of its stored numbers, without k_scale:
    every bound is one of them, so that nothing is rounded, and times a positive k_scale they bound what keys stand for.

    Args:
        lower, upper: `[blocks, Hkv, P, d]` by strides, in the cache's dtype; written. A row has room for `max_len`.
        kv: the layer's cache.
        page: tokens per page.
        start: int32 `[B]`, first changed logical position of each row.
        count: how many positions changed, the same for all rows, at least 0.
        table: int32 `[B, n]`, the blocks of each row: page p of row b lies at `[table[b, p // P], :, p % P]`. Entries
            beyond a row's last page are not looked at. Rows may share a block where they share its tokens. None: block
            b is all of row b.
        filled: a page that its row has yet to fill keeps its bounds: for rules that choose the last one unseen.
        implementation: "native" needs the cache that `decode_scores` says and bounds whose last stride is 1; "triton" a
            CUDA device and a head dim up to 512, for float8_e4m3fn one of compute capability 8.9. "auto" takes the
            first that can run of these, else the reference.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run.
    """
    check_integers("update_page_bounds", start=start)
    if lower.dim() != 4 or lower.shape != upper.shape or lower.shape[1::2] != (kv.kv_heads, kv.head_dim):
        raise KernelError(
            f"update_page_bounds: bounds must be [blocks, Hkv, P, d] for {kv.kv_heads} heads of {kv.head_dim}, got "
            f"{list(lower.shape)} and {list(upper.shape)}"
        )
    room = _room("update_page_bounds", lower, kv.rows.batch, table)
    if lower.dtype != kv.k.dtype or upper.dtype != kv.k.dtype:
        raise KernelError(f"update_page_bounds: bounds must be {kv.k.dtype}, got {lower.dtype} and {upper.dtype}")
    if page < 1 or count < 0 or room * page < kv.rows.max_len:
        raise KernelError(
            f"update_page_bounds: {room} pages of {page} cannot hold {kv.rows.max_len} tokens (count {count})"
        )
    if start.shape != (kv.rows.batch,):
        raise KernelError(f"update_page_bounds: start must be [{kv.rows.batch}], got {list(start.shape)}")
    if count == 0:
        return
    stored = Stored(lower, upper, table)
    chosen = choose(
        "update_page_bounds",
        implementation,
        native=lambda: native.update_refusal(stored, kv, start),
        triton=lambda: _triton_refusal((kv.k,), lower, upper, start, kv.rows.seq_lens, table),
    )
    kv = kv if chosen == "native" else kv.in_rows()
    if chosen == "triton":
        from saccade.kernels.page_bounds import triton

        return triton.update_page_bounds(stored, kv, page, start, count, filled)
    run = native.update_page_bounds if chosen == "native" else reference.update_page_bounds
    run(stored, kv, page, start, count, filled)


def page_scores(
    q: Tensor,
    lower: Tensor,
    upper: Tensor,
    seq_lens: Tensor,
    *,
    page: int,
    pooling: Pooling,
    table: Tensor | None = None,
    pages: int | None = None,
    k_scale: Tensor | None = None,
    filling: KVView | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor | None]:
    """An upper bound of q·k over each page: `Σ_j max(q_j·upper_j, q_j·lower_j)`, unscaled, in float32.

    Computed as `q⁺·upper + q⁻·lower` with the positive and negative parts of q (ReSA, section 2.1, after Quest).
    "max" takes the largest bound of a group's query heads, "mean" the bound of their mean query (it is not linear:
    the query is pooled first), "each" one bound per query head.

    Args:
        q: queries `[B, Hq, d]`, floating point.
        lower, upper: `[blocks, Hkv, P, d]` as `update_page_bounds` keeps them. Pages behind a row's last one are not
            read.
        seq_lens: int32 `[B]`; a row of length 0 has no page.
        page: tokens per page.
        pooling: "max", "mean" or "each".
        table: int32 `[B, n]`, where the pages of each row lie, as in `update_page_bounds`; None: block b is row b's.
        pages: pages of each row to score; None: all that there is room for, n · P or (without a table) P.
        k_scale: positive factors `[Hkv]`, or one for all heads, of a quantised cache: scores are those of k · k_scale.
        filling: the cache of these rows, where `update_page_bounds` has not followed their latest tokens yet: pages
            that these fill are bounded meanwhile, as with `filled`; scores of these are undefined too.
        implementation: "native" needs the library that the install builds where there is a C compiler, float32 or
            bfloat16 bounds on CPU whose last stride is 1, a head dim that is a multiple of 16 up to 256 and at most 32
            query heads per KV head, and no k_scale. "triton" needs what it needs for the update. "auto" takes the first
            that can run of these, else the reference.

    Returns:
        float32 `[B, G, pages]`, G = Hkv or (for "each") Hq; undefined at and after page ⌈seq_len / page⌉. And the best
        of NEIGHBOURS pages each, as `topk_and_last` takes them, where a kernel has them at hand; else None.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run.
    """
    check_integers("page_scores", seq_lens=seq_lens)
    check_pooling("page_scores", pooling)
    if q.dim() != 3 or lower.dim() != 4 or lower.shape != upper.shape or not q.is_floating_point():
        raise KernelError(
            f"page_scores: q [B, Hq, d] and bounds [blocks, Hkv, P, d] do not fit: {list(q.shape)}, "
            f"{list(lower.shape)}, {list(upper.shape)}"
        )
    if q.shape[2] != lower.shape[3] or q.shape[1] % lower.shape[1]:
        raise KernelError(f"page_scores: q {list(q.shape)} does not match bounds {list(lower.shape)}")
    room = _room("page_scores", lower, q.shape[0], table)
    pages = room if pages is None else pages
    if not 0 <= pages <= room:
        raise KernelError(f"page_scores: {pages} pages are wanted, there is room for {room}")
    if seq_lens.shape != q.shape[:1] or page < 1 or pooling is None:
        raise KernelError("page_scores: seq_lens must be [B], page at least 1 and pooling max, mean or each")
    if filling is not None and (filling.k.dtype, filling.kv_heads) != (lower.dtype, lower.shape[1]):
        raise KernelError(f"page_scores: filling must be the {lower.dtype} cache of these rows, got {filling.k.dtype}")
    if k_scale is not None and k_scale.shape not in ((), (1,), (lower.shape[1],)):
        raise KernelError(f"page_scores: k_scale must be [{lower.shape[1]}], got {list(k_scale.shape)}")
    stored = Stored(lower, upper, table)
    chosen = choose(
        "page_scores",
        implementation,
        native=lambda: (
            native.refusal(q, stored, seq_lens) if k_scale is None else "the bounds are of a quantised cache"
        ),
        triton=lambda: _triton_refusal((q,), lower, upper, seq_lens, k_scale, table),
    )
    if chosen == "triton":
        from saccade.kernels.page_bounds import triton

        return triton.page_scores(q, stored, seq_lens, page, pooling, pages, k_scale, filling and filling.in_rows())
    if filling is not None:
        latest: dict[str, Any] = {"page": page, "start": seq_lens - 1, "count": 1, "table": table, "filled": True}
        update_page_bounds(lower, upper, filling, **latest, implementation=implementation)
    if chosen == "native":
        return native.page_scores(q, stored, seq_lens, page, pooling, pages), None
    return reference.page_scores(q, stored, seq_lens, page, pooling, pages, k_scale), None


def _triton_refusal(numbers: tuple[Tensor, ...], lower: Tensor, upper: Tensor, *others: Tensor | None) -> str | None:
    """Why Triton cannot compute with these, or None; `others` are lists of integers, scales, or absent."""
    numbers = (*numbers, lower, upper)
    refusal = refusals.refusal(*numbers, *(tensor for tensor in others if tensor is not None))
    if refusal is None and lower.shape[3] > _MOST_DIM:
        refusal = f"head dim {lower.shape[3]} is above {_MOST_DIM}"
    return refusal or refusals.dtype_refusal("a tensor", *numbers)


def _room(operation: str, lower: Tensor, batch: int, table: Tensor | None) -> int:
    """Pages that the bounds of each of `batch` rows can hold."""
    if table is None:
        if lower.shape[0] != batch:
            raise KernelError(f"{operation}: without a table {batch} rows need a block each, not {lower.shape[0]}")
        return lower.shape[2]
    check_integers(operation, table=table)
    if table.dim() != 2 or table.shape[0] != batch:
        raise KernelError(f"{operation}: table must be [{batch}, n], got {list(table.shape)}")
    return table.shape[1] * lower.shape[2]
