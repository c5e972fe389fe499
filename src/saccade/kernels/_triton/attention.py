"""Decoding attention in Triton: all tokens, sets, or both, in one launch, and another that joins the parts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._triton import plan
from saccade.kernels._triton.combine import MOST_JOINED, combine, join
from saccade.kernels._triton.early import await_previous, early
from saccade.kernels._triton.heads import as_bits, head_at, is_flagged, rank_of, unpacked
from saccade.kernels._triton.operands import LEAST_DIM, LEAST_TILE, head_factors, item_size, set_steps, widened
from saccade.kernels._triton.stream import load_query, stream
from saccade.types import Flags, KVView, Pooling, Selection, Softmax, Workspace


def attend(
    q: Tensor,
    kv: KVView,
    softmax: Softmax,
    *,
    out: Tensor | None = None,
    selection: Selection | None = None,
    dense: Flags | None = None,
    pooling: Pooling | None = None,
    scored: Flags | None = None,
    workspace: Workspace | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of every row's query, and the raw scores of the heads flagged in `scored` (None: of all).

    Without a selection all heads attend to all tokens; with one, the heads that `dense` flags (None: no head), and the
    rows that are whole.
    """
    flags = (selection is None,) * kv.kv_heads if dense is None else dense
    batch, query_heads, head_dim = q.shape
    group = query_heads // kv.kv_heads
    rows = kv.rows
    kept = flags if scored is None else scored
    scores: Tensor | None = None
    if pooling is not None:
        stored = sum(kept) * (group if pooling == "each" else 1)
        scores = torch.empty((batch, stored, rows.max_len), dtype=torch.float32, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    work = _Work.of(q, kv, selection, flags)
    most = max(work.dense_splits, work.sparse_splits)
    direct = most == 1
    parts = out if direct else torch.empty((batch, query_heads, most, head_dim), dtype=torch.float32, device=q.device)
    sums = out if direct else torch.empty((batch, query_heads, most), dtype=torch.float32, device=q.device)
    ids, counts = (None, None) if selection is None else (selection.ids, selection.counts)
    whole = None if selection is None else rows.whole
    turns = None if workspace is None or any(flags) or direct or most > MOST_JOINED else workspace.turns
    if turns is not None and turns.numel() < batch * query_heads:
        raise KernelError(f"the workspace holds {turns.numel()} numbers, and {batch * query_heads} are needed")
    table = rows.page_table
    inner = max(LEAST_DIM, triton.next_power_of_2(head_dim))
    registers = work.tuning.registers
    if not any(flags) and kv.k.element_size() == 2 and inner <= 128 and group <= LEAST_TILE:
        registers = min(registers, plan.LISTED_REGISTERS)
    with torch.cuda.device_of(q):
        _attend[work.grid](
            q, *q.stride(),
            kv.k, *kv.k.stride(), kv.v, *kv.v.stride(),
            *head_factors(kv.k_scale, kv.kv_heads), *head_factors(kv.v_scale, kv.kv_heads),
            softmax.scale * math.log2(math.e), (softmax.cap or 0.0) * math.log2(math.e),
            table, *table.stride(), rows.row_start, rows.row_start.stride(0), rows.seq_lens, rows.seq_lens.stride(0),
            ids, *set_steps(ids, 3), counts, *set_steps(counts, 2), 0 if ids is None else ids.shape[2], whole,
            parts, sums, most, turns, out,
            softmax.sinks, scores, 0 if scores is None else scores.shape[1], rows.max_len,
            batch, kv.kv_heads, as_bits(flags), as_bits(kept), work.dense_splits, work.sparse_splits,
            GROUP=group, LISTED_GROUP=1 if work.set_per_query else group,
            TILE=max(LEAST_TILE, triton.next_power_of_2(group)),
            DIM=head_dim, INNER=inner,
            PAGE=0 if table.shape[1] == 1 else kv.page, UNIT=1 if selection is None else selection.unit,
            ALL=any(flags), LISTED=not all(flags),
            POOLING=pooling if pooling is not None and any(kept) else "",
            WIDE=widened(q, kv.k, kv.v), DIRECT=direct, CAPPED=softmax.cap is not None,
            JOINED=1 if turns is None else triton.next_power_of_2(most),
            BLOCK=work.tuning.block, STAGES=work.tuning.stages,
            num_warps=work.tuning.warps, maxnreg=registers, **early(q.device, batch, kv.kv_heads),
        )  # fmt: skip
        if not direct and turns is None:
            combine(parts, sums, softmax.sinks, out, group, as_bits(flags), (work.dense_splits, work.sparse_splits))
    return out, scores


@dataclass(frozen=True, slots=True)
class _Work:
    """The programs of a launch.

    Attributes:
        dense_splits, sparse_splits: parts of a head's tokens.
        set_per_query: whether query heads of a sparse KV head read sets of their own, and so are apart.
        grid: one dimension where heads are of both kinds, those of dense heads first; else streams, rows and parts,
            which programs need not divide to know.
    """

    tuning: plan.Tuning
    dense_splits: int
    sparse_splits: int
    set_per_query: bool
    grid: tuple[int, ...]

    @classmethod
    def of(cls, q: Tensor, kv: KVView, selection: Selection | None, dense: Flags) -> _Work:
        batch, query_heads, head_dim = q.shape
        longest, planned = kv.rows.max_len, plan.padded(batch)
        apart = selection is not None and not all(dense) and selection.groups == query_heads != kv.kv_heads
        listed = 0 if selection is None else min(selection.ids.shape[2], -(-longest // selection.unit)) * selection.unit
        tuning = plan.tuning(triton.next_power_of_2(head_dim), item_size(q, kv.k, kv.v))
        blocks, listed_blocks = -(-longest // tuning.block), -(-listed // tuning.block)
        dense_streams = sum(dense)
        sparse_streams = (len(dense) - sum(dense)) * (query_heads // kv.kv_heads if apart else 1)
        dense_splits, sparse_splits = plan.split_counts(
            ((planned * dense_streams, blocks), (planned * sparse_streams, listed_blocks)),
            plan.processors(q.device) * tuning.resident,
        )
        streams, splits = (dense_streams, dense_splits) if dense_streams else (sparse_streams, sparse_splits)
        grid: tuple[int, ...] = (streams, batch, splits)
        if dense_streams and sparse_streams:
            grid = (batch * (dense_streams * dense_splits + sparse_streams * sparse_splits),)
        return cls(tuning, dense_splits, sparse_splits, apart, grid)


@triton.jit(
    do_not_specialize=[
        *("max_len", "width", "most", "stored_heads", "batch", "kv_heads"),
        *("dense_heads", "kept_heads", "dense_splits", "sparse_splits"),
    ]
)
def _attend(
    q: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, q_dim: tl.tensor, k: tl.tensor, k_page: tl.tensor,
    k_slot: tl.tensor, k_head: tl.tensor, k_dim: tl.tensor, v: tl.tensor, v_page: tl.tensor, v_slot: tl.tensor,
    v_head: tl.tensor, v_dim: tl.tensor, k_scale: tl.tensor, k_scale_step: tl.tensor, v_scale: tl.tensor,
    v_scale_step: tl.tensor, log2_scale: tl.tensor, log2_cap: tl.tensor, table: tl.tensor, table_row: tl.tensor,
    table_step: tl.tensor, starts: tl.tensor, starts_step: tl.tensor, lengths: tl.tensor, lengths_step: tl.tensor,
    ids: tl.tensor, ids_row: tl.tensor, ids_set: tl.tensor, ids_step: tl.tensor, counts: tl.tensor,
    counts_row: tl.tensor, counts_set: tl.tensor, width: tl.tensor, whole: tl.tensor, parts: tl.tensor, sums: tl.tensor,
    most: tl.tensor, turns: tl.tensor, out: tl.tensor, sinks: tl.tensor, scores: tl.tensor, stored_heads: tl.tensor,
    max_len: tl.tensor, batch: tl.tensor, kv_heads: tl.tensor, dense_heads: tl.tensor, kept_heads: tl.tensor,
    dense_splits: tl.tensor, sparse_splits: tl.tensor,
    GROUP: tl.constexpr, LISTED_GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr,
    PAGE: tl.constexpr, UNIT: tl.constexpr, ALL: tl.constexpr, LISTED: tl.constexpr, POOLING: tl.constexpr,
    WIDE: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr, JOINED: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One part of one row's head: first those of all dense heads, then those of the others."""
    await_previous(EARLY)
    program = tl.program_id(0)
    if ALL and LISTED:
        flags = unpacked(dense_heads)
        heads = tl.sum(flags, axis=0)
        first_listed = batch * heads * dense_splits
        is_dense = program < first_listed
        if is_dense:
            splits = dense_splits
            apart = 1
        else:
            flags = tl.where(tl.arange(0, 64) < kv_heads, 1 - flags, 0)
            heads = kv_heads - heads
            program -= first_listed
            splits = sparse_splits
            apart = GROUP // LISTED_GROUP
        stream_number = program % (heads * apart)
        program = program // (heads * apart)
        head = head_at(flags, stream_number // apart)
        member = stream_number % apart
        row = (program % batch).to(tl.int64)
        split = program // batch
    else:
        is_dense: tl.constexpr = ALL  # type: ignore[no-redef]
        splits = dense_splits if ALL else sparse_splits
        apart = GROUP // LISTED_GROUP
        head = program // apart
        member = program % apart
        row = tl.program_id(1).to(tl.int64)
        split = tl.program_id(2)
    rows = tl.where(is_dense, GROUP, LISTED_GROUP)
    first = head * GROUP + member

    length = tl.load(lengths + row * lengths_step)
    if ALL and not DIRECT:
        busy = (not is_dense) | (split == 0) | (split * BLOCK < length)
    else:
        busy: tl.constexpr = True  # type: ignore[no-redef]
    tile = tl.arange(0, TILE)
    place = (row * kv_heads * GROUP + first + tile) * most + split
    if busy:
        start = tl.load(starts + row * starts_step)
        k_factor = 1.0
        if k_scale is not None:
            k_factor = tl.load(k_scale + head * k_scale_step).to(tl.float32)
        query = load_query(q + row * q_row + first * q_head, q_head, q_dim, rows, TILE, DIM, INNER)
        if WIDE:
            query = query.to(tl.float32)
        own_k = k + head.to(tl.int64) * k_head
        own_v = v + head.to(tl.int64) * v_head
        own_table = table + row * table_row
        own_scores = scores
        stored = 0
        if POOLING != "":
            kept = unpacked(kept_heads)
            stored = tl.where(is_flagged(kept, head), max_len, 0)
            sets: tl.constexpr = GROUP if POOLING == "each" else 1
            own_scores = scores + (row * stored_heads + rank_of(kept, head) * sets) * max_len
        if is_dense:
            weighted, summed = stream(
                query, own_k, own_v, k_page, k_slot, k_dim, v_page, v_slot, v_dim, k_factor, log2_scale, log2_cap,
                own_table, table_step, start, length, ids, ids_step, 0, True, length, split, splits,
                own_scores, max_len, stored, CAPPED, False, 1, GROUP, TILE, DIM, INNER, PAGE, POOLING, BLOCK, STAGES,
            )  # fmt: skip
        else:
            number = first // LISTED_GROUP
            limit = tl.minimum(tl.load(counts + row * counts_row + number * counts_set), width) * UNIT
            everything = False
            if whole is not None:
                everything = tl.load(whole + row) != 0
            limit = tl.where(everything, length, limit)
            weighted, summed = stream(
                query, own_k, own_v, k_page, k_slot, k_dim, v_page, v_slot, v_dim, k_factor, log2_scale, log2_cap,
                own_table, table_step, start, length, ids + row * ids_row + number * ids_set, ids_step,
                width * UNIT, everything, limit, split, splits,
                own_scores, max_len, 0, CAPPED, True, UNIT, LISTED_GROUP, TILE, DIM, INNER, PAGE, "", BLOCK, STAGES,
            )  # fmt: skip

        if DIRECT and sinks is not None:
            logit = tl.load(sinks + first + tile, mask=tile < rows, other=0.0).to(tl.float32)
            weighted /= (1 + tl.exp2(logit * 1.4426950408889634 - summed))[:, None]
        if v_scale is not None:
            weighted *= tl.load(v_scale + head * v_scale_step).to(tl.float32)
        dims = tl.arange(0, INNER)
        inside = (tile < rows)[:, None] & (dims < DIM)[None, :]
        tl.store(parts + place[:, None] * DIM + dims[None, :], weighted.to(parts.dtype.element_ty), mask=inside)
        if not DIRECT:
            tl.store(sums + place, summed, mask=tile < rows)
            if turns is not None:
                # What this program has written is seen by whoever counts behind it.
                tl.debug_barrier()
                query = row * kv_heads * GROUP + first
                if tl.atomic_add(turns + query, 1, sem="acq_rel", scope="gpu") == splits - 1:
                    tl.store(turns + query, 0)
                    joined = join(
                        parts, sums, sinks, place - split, first + tile, tile < rows, splits, TILE, DIM, INNER, JOINED
                    )
                    spots = out + (query + tile)[:, None] * DIM + dims[None, :]
                    tl.store(spots, joined.to(out.dtype.element_ty), mask=inside)
    else:
        # Grids follow bounds: most programs of a short row find nothing to read.
        tl.store(sums + place, tl.full((TILE,), float("-inf"), tl.float32), mask=tile < rows)
