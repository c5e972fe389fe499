"""Page bounds on a GPU: one launch recomputes the touched pages; one scores pages, reading each bound once."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._checks import NEIGHBOURS
from saccade.kernels._stored_bounds import Stored
from saccade.kernels._triton.early import RECENT, await_previous, early
from saccade.kernels._triton.plan import padded, processors
from saccade.types import KVView, Pooling

_HALVES = (torch.bfloat16, torch.float16)

LEAST = 8 if RECENT else 16
"""Columns of a product, at least, by Triton."""
RESIDENT = 8
"""Scoring programs that a multiprocessor runs at once, about."""
WAVES = 4
"""Times that all of them are filled at most, so that rows of different lengths even out.

Of 2, 4, 8 and 16 on an H200 (docs/log.md) 4 and fewer were as fast but for many short rows, where 2 gains 3% more.
"""


@triton.jit(do_not_specialize=["count"])
def _update(
    k: tl.tensor, lower: tl.tensor, upper: tl.tensor, page_table: tl.tensor, row_start: tl.tensor, seq_lens: tl.tensor,
    start: tl.tensor, table: tl.tensor, k_page_step: tl.tensor, k_slot_step: tl.tensor, k_head_step: tl.tensor,
    k_dim_step: tl.tensor, lower_block_step: tl.tensor, lower_head_step: tl.tensor, lower_page_step: tl.tensor,
    lower_dim_step: tl.tensor, upper_block_step: tl.tensor, upper_head_step: tl.tensor, upper_page_step: tl.tensor,
    upper_dim_step: tl.tensor, page_table_step: tl.tensor, table_step: tl.tensor, kv_heads: tl.tensor,
    kv_page: tl.tensor, block_pages: tl.tensor, count: tl.tensor,
    TABLED: tl.constexpr, FILLED: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1)
    length = tl.load(seq_lens + row)
    begin = tl.maximum(tl.load(start + row), 0)
    end = tl.minimum(tl.load(start + row) + count, length // PAGE * PAGE if FILLED else length)
    number = begin // PAGE + tl.program_id(0) // kv_heads
    if (begin < end) & (number * PAGE < end):
        _bound(
            k, lower, upper, page_table, row_start, table, k_page_step, k_slot_step, k_head_step, k_dim_step,
            lower_block_step, lower_head_step, lower_page_step, lower_dim_step, upper_block_step, upper_head_step,
            upper_page_step, upper_dim_step, page_table_step, table_step, kv_page, block_pages,
            row, (tl.program_id(0) % kv_heads).to(tl.int64), number, length,
            TABLED, PAGE, HEAD_DIM, DIMS, TOKENS,
        )  # fmt: skip


@triton.jit
def _bound(
    k: tl.tensor, lower: tl.tensor, upper: tl.tensor, page_table: tl.tensor, row_start: tl.tensor, table: tl.tensor,
    k_page_step: tl.tensor, k_slot_step: tl.tensor, k_head_step: tl.tensor, k_dim_step: tl.tensor,
    lower_block_step: tl.tensor, lower_head_step: tl.tensor, lower_page_step: tl.tensor, lower_dim_step: tl.tensor,
    upper_block_step: tl.tensor, upper_head_step: tl.tensor, upper_page_step: tl.tensor, upper_dim_step: tl.tensor,
    page_table_step: tl.tensor, table_step: tl.tensor, kv_page: tl.tensor, block_pages: tl.tensor,
    row: tl.tensor, head: tl.tensor, number: tl.tensor, length: tl.tensor,
    TABLED: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """Bound page `number` of a row of `length` tokens, in one head."""
    dims = tl.arange(0, DIMS)
    first_slot = tl.load(row_start + row)
    pages = page_table + row.to(tl.int64) * page_table_step
    last = tl.minimum(number * PAGE + PAGE, length) - 1
    low = tl.full((TOKENS, DIMS), float("inf"), tl.float32)
    high = tl.full((TOKENS, DIMS), float("-inf"), tl.float32)
    for offset in tl.range(0, PAGE, TOKENS, num_stages=3):
        # What lies beyond the page or the row is read as its last token: no mask is needed.
        slots = first_slot + tl.minimum(number * PAGE + offset + tl.arange(0, TOKENS), last)
        stored = tl.load(pages + slots // kv_page).to(tl.int64)
        tokens = k + stored * k_page_step + (slots % kv_page).to(tl.int64) * k_slot_step + head * k_head_step
        keys = tl.load(
            tokens[:, None] + dims[None, :].to(tl.int64) * k_dim_step, mask=dims[None, :] < HEAD_DIM, other=0.0
        ).to(tl.float32)
        low = tl.minimum(low, keys, propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(high, keys, propagate_nan=tl.PropagateNan.ALL)
    broken = tl.max((low != low).to(tl.int32), axis=0) > 0  # a reduction drops NaN
    smallest = tl.where(broken, float("nan"), tl.min(low, axis=0))
    largest = tl.where(broken, float("nan"), tl.max(high, axis=0))
    if TABLED:
        block = tl.load(table + row.to(tl.int64) * table_step + number // block_pages).to(tl.int64)
        inside = (number % block_pages).to(tl.int64)
    else:
        block = row.to(tl.int64)
        inside = number.to(tl.int64)
    lower += block * lower_block_step + head * lower_head_step + inside * lower_page_step
    upper += block * upper_block_step + head * upper_head_step + inside * upper_page_step
    real = dims < HEAD_DIM
    tl.store(lower + dims.to(tl.int64) * lower_dim_step, smallest.to(lower.dtype.element_ty), mask=real)
    tl.store(upper + dims.to(tl.int64) * upper_dim_step, largest.to(upper.dtype.element_ty), mask=real)


def tokens_at_once(page: int, dims: int) -> int:
    """Keys of a page that a program holds: as many as a warp has registers for, or two warps that read on meanwhile."""
    padded: int = triton.next_power_of_2(page)
    return min(padded, max(2048 // dims, 1))


def update_page_bounds(stored: Stored, kv: KVView, page: int, start: Tensor, count: int, filled: bool) -> None:
    (lower, upper, table), k, rows = stored, kv.k, kv.rows
    dims = max(triton.next_power_of_2(kv.head_dim), 16)
    tokens = tokens_at_once(page, dims)
    # Pages that `count` tokens can touch at worst; a row that touches fewer has programs that return at once.
    most = (count + page - 2) // page + 1
    page_table = rows.page_table if rows.page_table.stride(1) == 1 else rows.page_table.contiguous()
    places = rows.seq_lens if table is None else table if table.stride(1) == 1 else table.contiguous()
    with torch.cuda.device_of(k):
        _update[most * kv.kv_heads, rows.batch](
            k, lower, upper, page_table, rows.row_start.contiguous(), rows.seq_lens.contiguous(), start.contiguous(),
            places, *k.stride(), *lower.stride(), *upper.stride(), page_table.stride(0), places.stride(0),
            kv.kv_heads, kv.page, lower.shape[2], count,
            TABLED=table is not None, FILLED=filled, PAGE=page, HEAD_DIM=kv.head_dim, DIMS=dims, TOKENS=tokens,
            num_warps=1 if tokens >= page else 2,
        )  # fmt: skip


@triton.jit(do_not_specialize=["pages", "scores_step", "parts"])
def _score(
    q: tl.tensor, lower: tl.tensor, upper: tl.tensor, seq_lens: tl.tensor, table: tl.tensor, k_scale: tl.tensor,
    scores: tl.tensor, tiles: tl.tensor, k: tl.tensor, page_table: tl.tensor, row_start: tl.tensor,
    q_row_step: tl.tensor, q_head_step: tl.tensor, q_dim_step: tl.tensor,
    lower_block_step: tl.tensor, lower_head_step: tl.tensor, lower_page_step: tl.tensor, lower_dim_step: tl.tensor,
    upper_block_step: tl.tensor, upper_head_step: tl.tensor, upper_page_step: tl.tensor, upper_dim_step: tl.tensor,
    k_page_step: tl.tensor, k_slot_step: tl.tensor, k_head_step: tl.tensor, k_dim_step: tl.tensor,
    page_table_step: tl.tensor, kv_page: tl.tensor,
    table_step: tl.tensor, k_scale_step: tl.tensor, kv_heads: tl.tensor, block_pages: tl.tensor, page: tl.tensor,
    pages: tl.tensor, scores_step: tl.tensor, parts: tl.tensor,
    TABLED: tl.constexpr, SCALED: tl.constexpr, POOLING: tl.constexpr, DOT: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, MEMBERS: tl.constexpr, DIMS: tl.constexpr, PAGES: tl.constexpr, NEAR: tl.constexpr,
    FILLED: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Every `parts`-th tile of a head's pages; those behind a row's last page leave at once.

    The first programs bound the pages that the rows' latest tokens have filled, of FILLED tokens; 0: nobody does.
    """
    await_previous(EARLY)
    row = tl.program_id(1)
    length = tl.load(seq_lens + row)
    program = tl.program_id(0)
    if FILLED:
        program -= kv_heads
        if (program < 0) & (length > 0) & (length % FILLED == 0):
            _bound(
                k, lower, upper, page_table, row_start, table, k_page_step, k_slot_step, k_head_step, k_dim_step,
                lower_block_step, lower_head_step, lower_page_step, lower_dim_step, upper_block_step, upper_head_step,
                upper_page_step, upper_dim_step, page_table_step, table_step, kv_page, block_pages,
                row, tl.program_id(0).to(tl.int64), length // FILLED - 1, length,
                TABLED, FILLED, HEAD_DIM, DIMS, TOKENS,
            )  # fmt: skip
    used = tl.minimum((length + page - 1) // page, pages)
    first = program // kv_heads * PAGES
    if (program < 0) | (first >= used):
        return
    head, row = (program % kv_heads).to(tl.int64), row.to(tl.int64)
    dims = tl.arange(0, DIMS)
    real = dims < HEAD_DIM
    q += row * q_row_step + head * GROUP * q_head_step + dims.to(tl.int64) * q_dim_step
    lower += head * lower_head_step
    upper += head * upper_head_step
    per_head: tl.constexpr = GROUP if POOLING == "each" else 1
    scores += (row * kv_heads + head) * per_head * scores_step
    if NEAR:
        tiles += (row * kv_heads + head) * ((pages + NEAR - 1) // NEAR)
    scale = 1.0
    if SCALED:
        scale = tl.load(k_scale + head * k_scale_step).to(tl.float32)
    # A component that is NaN stays one in both parts.
    if DOT:
        members = tl.arange(0, MEMBERS)
        query = tl.load(
            q[:, None] + members[None, :].to(tl.int64) * q_head_step,
            mask=real[:, None] & (members[None, :] < GROUP),
            other=0.0,
        )
        positive = tl.where(query < 0, 0.0, query).to(q.dtype.element_ty)
        negative = tl.where(query > 0, 0.0, query).to(q.dtype.element_ty)
    elif POOLING == "mean":
        total = tl.zeros((DIMS,), tl.float32)
        for member in range(GROUP):
            total += tl.load(q + member * q_head_step, mask=real, other=0.0).to(tl.float32)
        query = total / GROUP
        positive = tl.where(query < 0, 0.0, query)
        negative = tl.where(query > 0, 0.0, query)

    for tile in tl.range(first, used, PAGES * parts):
        numbers = tile + tl.arange(0, PAGES)
        present = numbers < used
        if TABLED:
            block = tl.load(table + row * table_step + numbers // block_pages, mask=present, other=0).to(tl.int64)
            inside = (numbers % block_pages).to(tl.int64)
        else:
            block = row
            inside = numbers.to(tl.int64)
        low_places = block * lower_block_step + inside * lower_page_step
        high_places = block * upper_block_step + inside * upper_page_step
        some = present[:, None] & real[None, :]
        high = tl.load(upper + high_places[:, None] + dims[None, :].to(tl.int64) * upper_dim_step, mask=some, other=0.0)
        low = tl.load(lower + low_places[:, None] + dims[None, :].to(tl.int64) * lower_dim_step, mask=some, other=0.0)
        if DOT:
            each = tl.dot(high.to(q.dtype.element_ty), positive)
            each = tl.dot(low.to(q.dtype.element_ty), negative, each) * scale
            if POOLING == "max":
                each = tl.where(members[None, :] < GROUP, each, float("-inf"))
                broken = tl.max((each != each).to(tl.int32), axis=1) > 0  # a reduction drops NaN
                best = tl.where(broken, float("nan"), tl.max(each, axis=1))
                tl.store(scores + numbers, best, mask=present)
                if NEAR:
                    near = tl.max(tl.reshape(tl.where(present, best, float("-inf")), [PAGES // NEAR, NEAR]), 1)
                    place = tile // NEAR + tl.arange(0, PAGES // NEAR)
                    tl.store(tiles + place, near, mask=place * NEAR < used)
            else:
                places = members[None, :].to(tl.int64) * scores_step + numbers[:, None]
                tl.store(scores + places, each, mask=present[:, None] & (members[None, :] < GROUP))
        else:
            high = high.to(tl.float32)
            low = low.to(tl.float32)
            if POOLING == "mean":
                best = tl.sum(high * positive[None, :] + low * negative[None, :], axis=1)
                tl.store(scores + numbers, best * scale, mask=present)
            else:
                best = tl.full((PAGES,), float("-inf"), tl.float32)
                for member in range(GROUP):
                    query = tl.load(q + member * q_head_step, mask=real, other=0.0).to(tl.float32)
                    above = tl.where(query < 0, 0.0, query)
                    below = tl.where(query > 0, 0.0, query)
                    score = tl.sum(high * above[None, :] + low * below[None, :], axis=1) * scale
                    if POOLING == "each":
                        tl.store(scores + member * scores_step.to(tl.int64) + numbers, score, mask=present)
                    else:
                        best = tl.where((score > best) | (score != score), score, best)
                if POOLING == "max":
                    tl.store(scores + numbers, best, mask=present)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the work is cut.

    Attributes:
        dot: whether a group's queries meet the bounds on tensor cores; else one after the other in float32.
        pages: bounds that a program holds at a time.
        tiles: how many times it does at least, where a row has so many.
        warps, stages: Triton's.
    """

    dot: bool
    pages: int
    tiles: int
    warps: int
    stages: int

    def parts(self, streams: int, pages: int, processors: int) -> int:
        """Programs among which the `pages` of each of so many rows' heads are dealt.

        Grids follow bounds, and programs that find nothing to do cost their launch: many rows have fewer each.
        """
        filling = -(-WAVES * processors * RESIDENT // max(streams, 1))
        return max(1, min(-(-pages // (self.pages * self.tiles)), filling))


def plan(q: Tensor, lower: Tensor, upper: Tensor, pooling: Pooling) -> Plan:
    """Constants from what the host knows: the fastest of 70 on an H200, for heads of 128 of 9 more (docs/log.md).

    Tensor cores take the parts of a 16-bit query as they are and add up in float32; a mean query has more digits, and
    few heads are as quickly bounded without.
    """
    group, dims = q.shape[1] // lower.shape[1], max(triton.next_power_of_2(q.shape[2]), 16)
    exact = all(bounds.dtype == q.dtype or bounds.element_size() == 1 for bounds in (lower, upper))
    if q.dtype in _HALVES and exact and pooling != "mean" and 2 < group <= 32:
        pages = 32 if dims == 128 else max(8192 // dims, 16)  # fewer were timed for heads of 128 alone
        return Plan(dot=True, pages=pages, tiles=2, warps=2, stages=3)
    return Plan(dot=False, pages=max(2048 // dims, 1), tiles=4, warps=2, stages=1)


def page_scores(
    q: Tensor,
    stored: Stored,
    seq_lens: Tensor,
    page: int,
    pooling: Pooling,
    pages: int,
    k_scale: Tensor | None,
    filling: KVView | None,
) -> tuple[Tensor, Tensor | None]:
    """Scores, and the best of NEIGHBOURS pages each where a program has them together."""
    lower, upper, table = stored
    batch, query_heads, head_dim = q.shape
    kv_heads = lower.shape[1]
    group = query_heads // kv_heads
    sets = query_heads if pooling == "each" else kv_heads
    # Rows begin at whole numbers of 16 bytes, in which they are read again.
    scores = torch.empty((batch, sets, triton.cdiv(pages, 4) * 4), dtype=torch.float32, device=q.device)
    cut = plan(q, lower, upper, pooling)
    near = NEIGHBOURS if cut.dot and pooling == "max" and cut.pages % NEIGHBOURS == 0 else 0
    tiles = scores.new_empty((batch, sets, triton.cdiv(pages, near))) if near else None
    places = seq_lens if table is None else table if table.stride(1) == 1 else table.contiguous()
    scale = seq_lens if k_scale is None else k_scale.expand(kv_heads)
    parts = cut.parts(padded(batch) * kv_heads, pages, processors(q.device))
    dims = max(triton.next_power_of_2(head_dim), 16)
    k, slots, starts, kv_page = q[:, None], places, seq_lens, 1
    if filling is not None:
        k, slots, starts, kv_page = filling.k, filling.rows.page_table, filling.rows.row_start, filling.page
        slots = slots if slots.stride(1) == 1 else slots.contiguous()
    with torch.cuda.device_of(q):
        _score[(parts + (filling is not None)) * kv_heads, batch](
            q, lower, upper, seq_lens.contiguous(), places, scale, scores, tiles, k, slots, starts.contiguous(),
            *q.stride(), *lower.stride(), *upper.stride(), *k.stride(), slots.stride(0), kv_page,
            places.stride(0), scale.stride(0), kv_heads, lower.shape[2], page, pages, scores.stride(1), parts,
            TABLED=table is not None, SCALED=k_scale is not None, POOLING=pooling, DOT=cut.dot, GROUP=group,
            HEAD_DIM=head_dim, MEMBERS=max(triton.next_power_of_2(group), LEAST), DIMS=dims, PAGES=cut.pages, NEAR=near,
            FILLED=0 if filling is None else page, TOKENS=tokens_at_once(page, dims),
            num_warps=cut.warps, num_stages=cut.stages, **early(q.device, batch, kv_heads),
        )  # fmt: skip
    return scores[:, :, :pages], tiles
