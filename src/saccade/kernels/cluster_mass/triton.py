"""Scores by attention mass on CUDA: logits of clusters with their sums in parts, then tokens; between them, chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._mass_tree import MassSettings, MassTree
from saccade.kernels._triton.operands import LEAST_DIM, LEAST_TILE, widened

CLUSTERS = 64
"""Clusters or chunks of a program: enough for a tile of a tensor core, few enough to occupy all processors."""
TOKENS = 1024
"""Tokens of a program."""
KEPT = 4096
"""Clusters that the one program which keeps some of a head's looks at together."""


def cluster_mass(q: Tensor, tree: MassTree, slots: Tensor, seq_lens: Tensor, settings: MassSettings) -> Tensor:
    (batch, query_heads, head_dim), (_, heads, count, _) = q.shape, tree.means.shape
    group, parts, pairs = query_heads // heads, triton.cdiv(count, CLUSTERS), batch * heads
    width, each, chunks, device = settings.width, settings.each, tree.chunks, q.device
    logits = torch.empty((batch, query_heads, count), dtype=torch.float32, device=device)
    totals = torch.empty((2, batch, query_heads, parts), dtype=torch.float32, device=device)
    scores = torch.empty((batch, query_heads if each else heads, width), dtype=torch.float32, device=device)
    counts = tree.ends if chunks is None else chunks.counts
    sums = (totals, parts, batch * query_heads * parts)
    asked = {
        **{"GROUP": group, "TILE": max(LEAST_TILE, triton.next_power_of_2(group)), "DIM": head_dim},
        **{"INNER": max(LEAST_DIM, triton.next_power_of_2(head_dim)), "WIDE": widened(q, tree.means)},
        **{"BLOCK": CLUSTERS, "num_warps": 4},
    }
    pooled = {"GROUP": group, "EACH": each, "PARTS": triton.next_power_of_2(parts)}
    sized = (tree.sizes, tree.spreads, *tree.sizes.stride())
    with torch.cuda.device_of(q):
        _logits[(pairs, parts)](
            q, *q.stride(), tree.means, *tree.means.stride(), *sized, counts, slots, logits, *sums, count, heads,
            tree.items, tree.clusters, settings.scale, settings.spread, **asked,
        )  # fmt: skip
        found, owners, steps = logits, tree.labels, tree.labels.stride()
        if chunks is not None:
            room = chunks.means.shape[2]
            kept = torch.empty((batch, query_heads if each else heads, count), dtype=torch.int32, device=device)
            _keep[(pairs * (group if each else 1),)](
                logits, *sums, tree.sizes, *tree.sizes.stride(), counts, slots, kept, count, heads, tree.items,
                tree.clusters, settings.reach, **pooled, BLOCK=min(KEPT, triton.next_power_of_2(count)), num_warps=8,
            )  # fmt: skip
            found = torch.empty((batch, query_heads, room), dtype=torch.float32, device=device)
            _chunk_logits[(pairs, triton.cdiv(room, CLUSTERS))](
                q, *q.stride(), chunks.means, *chunks.means.stride(), chunks.edges, chunks.edges.stride(0),
                chunks.spreads, *chunks.spreads.stride(), tree.labels, *tree.labels.stride(), kept, counts, slots,
                found, room, count, heads, tree.items, tree.clusters, settings.scale, settings.spread + 1, EACH=each,
                **asked,
            )  # fmt: skip
            owners, steps = chunks.owners, (chunks.owners.stride(0), 0, 1)
        _tokens[(pairs, triton.cdiv(width, TOKENS))](
            found, *sums, owners, *steps, tree.ends, slots, seq_lens, scores, found.shape[2], heads, width,
            settings.sinks, tree.items, 0 if chunks is not None else tree.clusters, owners.shape[-1], **pooled,
            BLOCK=TOKENS, num_warps=4,
        )  # fmt: skip
    return scores


@triton.jit
def _asked(
    q: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, q_dim: tl.tensor, means: tl.tensor, m_place: tl.tensor,
    m_dim: tl.tensor, row: tl.tensor, query: tl.tensor, places: tl.tensor, there: tl.tensor,
    GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Products `[TILE, BLOCK]` of a group's queries with means, and what a spread counts for each query."""
    dims, whose = tl.arange(0, INNER), tl.arange(0, TILE) < GROUP
    wide = dims < DIM
    # [TILE, d] and [d, BLOCK]
    asked = tl.load(
        q + row.to(tl.int64) * q_row + query[:, None] * q_head + dims[None, :] * q_dim,
        mask=whose[:, None] & wide[None, :], other=0.0,
    )  # fmt: skip
    mean = tl.load(
        means + places[None, :] * m_place + dims[:, None] * m_dim, mask=there[None, :] & wide[:, None], other=0.0
    )
    exact = asked.to(tl.float32)
    norm = tl.sqrt_rn(tl.sum(exact * exact, axis=1) / DIM)
    products = tl.dot(exact, mean.to(tl.float32), input_precision="ieee") if WIDE else tl.dot(asked, mean)
    return products, norm


@triton.jit
def _used(counts: tl.tensor, slot: tl.tensor, items: tl.tensor, clusters: tl.tensor) -> tl.tensor:
    """Places of clusters that may have tokens."""
    count, per_cluster = tl.load(counts + slot), (items + clusters - 1) // clusters
    return count // items * clusters + (count % items + per_cluster - 1) // per_cluster


@triton.jit(do_not_specialize=["parts", "plane", "count", "heads"])
def _logits(
    q: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, q_dim: tl.tensor, means: tl.tensor, m_slot: tl.tensor,
    m_head: tl.tensor, m_place: tl.tensor, m_dim: tl.tensor, sizes: tl.tensor, spreads: tl.tensor, s_slot: tl.tensor,
    s_head: tl.tensor, s_place: tl.tensor, counts: tl.tensor, slots: tl.tensor, logits: tl.tensor, totals: tl.tensor,
    parts: tl.tensor, plane: tl.tensor, count: tl.tensor, heads: tl.tensor, items: tl.tensor, clusters: tl.tensor,
    scale: tl.tensor, spread: tl.tensor,
    GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Of a group's query heads and a part of the clusters, and the largest and the sum of exp of the part."""
    pair, part = tl.program_id(0), tl.program_id(1)
    row, head = pair // heads, (pair % heads).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    used = _used(counts, slot, items, clusters)
    member = tl.arange(0, TILE)
    query, whose = head * GROUP + member, member < GROUP
    out = totals + (row * heads * GROUP + query) * parts + part
    if part * BLOCK >= used:
        tl.store(out, float("-inf"), mask=whose)
        tl.store(out + plane, 0.0, mask=whose)
        return
    places = part * BLOCK + tl.arange(0, BLOCK)
    there = places < used
    products, norm = _asked(
        q, q_row, q_head, q_dim, means + slot * m_slot + head * m_head, m_place, m_dim, row, query, places, there,
        GROUP, TILE, DIM, INNER, WIDE,
    )  # fmt: skip
    inner = slot * s_slot + head * s_head + places * s_place
    size = tl.load(sizes + inner, mask=there, other=0)
    far = tl.load(spreads + inner, mask=there & (size > 0), other=0.0)
    found = scale * (products + spread * norm[:, None] * far[None, :]) + tl.log(tl.maximum(size, 1).to(tl.float32))
    found = tl.where((size > 0)[None, :], found, float("-inf"))
    target = logits + (row * heads * GROUP + query)[:, None] * count + places[None, :]
    tl.store(target, found, mask=whose[:, None] & there[None, :])
    most = tl.max(found, axis=1)
    # A part without any cluster has nothing to be compared with.
    total = tl.sum(tl.exp(found - tl.where(most == float("-inf"), 0.0, most)[:, None]), axis=1)
    tl.store(out, most, mask=whose)
    tl.store(out + plane, total, mask=whose)


@triton.jit
def _total(
    totals: tl.tensor, plane: tl.tensor, parts: tl.tensor, query: tl.tensor, PARTS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The largest logit of a query head, and the sum of exp of all behind it."""
    part = tl.arange(0, PARTS)
    largest = tl.load(totals + query * parts + part, mask=part < parts, other=float("-inf"))
    sums = tl.load(totals + plane + query * parts + part, mask=part < parts, other=0.0)
    most = tl.max(largest, axis=0)
    most = tl.where(most == float("-inf"), 0.0, most)
    return most, tl.maximum(tl.sum(sums * tl.exp(largest - most), axis=0), 1e-30)


@triton.jit(do_not_specialize=["parts", "plane", "count", "heads", "reach"])
def _keep(
    logits: tl.tensor, totals: tl.tensor, parts: tl.tensor, plane: tl.tensor, sizes: tl.tensor, s_slot: tl.tensor,
    s_head: tl.tensor, s_place: tl.tensor, counts: tl.tensor, slots: tl.tensor, kept: tl.tensor, count: tl.tensor,
    heads: tl.tensor, items: tl.tensor, clusters: tl.tensor, reach: tl.tensor,
    GROUP: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Whether each cluster is among the best that hold `reach` tokens: before it are fewer."""
    each = GROUP if EACH else 1
    own = tl.program_id(0).to(tl.int64)
    row, head = own // (heads * each), own // each % heads
    slot = tl.load(slots + row).to(tl.int64)
    used, first = _used(counts, slot, items, clusters), own if EACH else own * GROUP
    inner = sizes + slot * s_slot + head * s_head
    kept += own * count
    # Shares are not negative, so that their bits compare as they do; a thread reads again what it has written.
    for begin in range(0, used, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        score = places * 0.0
        for member in tl.static_range(1 if EACH else GROUP):
            most, total = _total(totals, plane, parts, first + member, PARTS)
            there = places < used
            logit = tl.load(logits + (first + member) * count + places, mask=there, other=float("-inf"))
            score += tl.exp(logit - most) / total
        tl.store(kept + places, score.to(tl.int32, bitcast=True), mask=places < used)
    # The largest rank from which on clusters hold so many, found bit by bit.
    floor = tl.full((), 0, tl.int32)
    for bit in range(30, -1, -1):
        above, held = floor | (1 << bit), 0
        for begin in range(0, used, BLOCK):
            rank, size = _ranked(kept, inner, s_place, begin, used, BLOCK)
            held += tl.sum(tl.where(rank >= above, size, 0), axis=0)
        floor = tl.where(held >= reach, above, floor)
    before = 0
    for begin in range(0, used, BLOCK):
        rank, size = _ranked(kept, inner, s_place, begin, used, BLOCK)
        before += tl.sum(tl.where(rank > floor, size, 0), axis=0)
    for begin in range(0, used, BLOCK):
        rank, size = _ranked(kept, inner, s_place, begin, used, BLOCK)
        alike = tl.where(rank == floor, size, 0)
        stays = (rank > floor) | ((rank == floor) & (before + tl.cumsum(alike, axis=0) - alike < reach))
        places = begin + tl.arange(0, BLOCK)
        tl.store(kept + places, stays.to(tl.int32), mask=places < used)
        before += tl.sum(alike, axis=0)


@triton.jit
def _ranked(
    ranks: tl.tensor, sizes: tl.tensor, step: tl.tensor, begin: tl.tensor, used: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Ranks and tokens of the next clusters."""
    places = begin + tl.arange(0, BLOCK)
    rank = tl.load(ranks + places, mask=places < used, other=0)
    return rank, tl.load(sizes + places * step, mask=places < used, other=0)


@triton.jit(do_not_specialize=["room", "count", "heads"])
def _chunk_logits(
    q: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, q_dim: tl.tensor, means: tl.tensor, m_slot: tl.tensor,
    m_head: tl.tensor, m_place: tl.tensor, m_dim: tl.tensor, edges: tl.tensor, e_slot: tl.tensor, spreads: tl.tensor,
    s_slot: tl.tensor, s_head: tl.tensor, s_place: tl.tensor, labels: tl.tensor, l_slot: tl.tensor, l_head: tl.tensor,
    l_place: tl.tensor, kept: tl.tensor, counts: tl.tensor, slots: tl.tensor, found: tl.tensor, room: tl.tensor,
    count: tl.tensor, heads: tl.tensor, items: tl.tensor, clusters: tl.tensor, scale: tl.tensor, spread: tl.tensor,
    EACH: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Of the chunks whose cluster is kept, which alone are read; -inf of others."""
    pair, begin = tl.program_id(0), tl.program_id(1) * BLOCK
    row, head = pair // heads, (pair % heads).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    chunks = tl.load(counts + slot)
    if begin >= chunks:
        return
    places, member = begin + tl.arange(0, BLOCK), tl.arange(0, TILE)
    query, there = head * GROUP + member, places < chunks
    label = tl.load(labels + slot * l_slot + head * l_head + places * l_place, mask=there, other=0).to(tl.int32)
    cluster = label + places // items * clusters
    if EACH:
        sets = (row * heads * GROUP + query)[:, None] * count + cluster[None, :]
        stays = tl.load(kept + sets, mask=(member < GROUP)[:, None] & there[None, :], other=0) > 0
        wanted = there & (tl.max(stays.to(tl.int32), axis=0) > 0)
    else:
        wanted = there & (tl.load(kept + pair.to(tl.int64) * count + cluster, mask=there, other=0) > 0)
        stays = wanted[None, :] & (member >= 0)[:, None]
    products, norm = _asked(
        q, q_row, q_head, q_dim, means + slot * m_slot + head * m_head, m_place, m_dim, row, query, places, wanted,
        GROUP, TILE, DIM, INNER, WIDE,
    )  # fmt: skip
    far = tl.load(spreads + slot * s_slot + head * s_head + places * s_place, mask=wanted, other=0.0)
    start = tl.load(edges + slot * e_slot + places, mask=there, other=0)
    size = tl.load(edges + slot * e_slot + places + 1, mask=there, other=1) - start
    logit = scale * (products + spread * norm[:, None] * far[None, :]) + tl.log(tl.maximum(size, 1).to(tl.float32))
    target = found + (row * heads * GROUP + query)[:, None] * room + places[None, :]
    tl.store(target, tl.where(stays, logit, float("-inf")), mask=(member < GROUP)[:, None] & there[None, :])


@triton.jit(do_not_specialize=["parts", "plane", "count", "heads", "width", "room"])
def _tokens(
    logits: tl.tensor, totals: tl.tensor, parts: tl.tensor, plane: tl.tensor, labels: tl.tensor, l_slot: tl.tensor,
    l_head: tl.tensor, l_place: tl.tensor, ends: tl.tensor, slots: tl.tensor, seq_lens: tl.tensor, scores: tl.tensor,
    count: tl.tensor, heads: tl.tensor, width: tl.tensor, sinks: tl.tensor, items: tl.tensor, clusters: tl.tensor,
    room: tl.tensor,
    GROUP: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Each token has the share of what it is in: of every query head, or summed over the group."""
    pair, begin = tl.program_id(0), tl.program_id(1) * BLOCK
    row, head = pair // heads, (pair % heads).to(tl.int64)
    if begin >= tl.load(seq_lens + row):
        return
    slot = tl.load(slots + row).to(tl.int64)
    end = tl.load(ends + slot)
    position = begin + tl.arange(0, BLOCK)
    inside = position < width
    known = (position >= sinks) & (position < tl.minimum(end, room))
    label = tl.load(labels + slot * l_slot + head * l_head + position * l_place, mask=known, other=0)
    place = label.to(tl.int32) + position // items * clusters
    summed = tl.zeros((BLOCK,), dtype=tl.float32)
    for member in tl.static_range(GROUP):
        query = row * heads * GROUP + head * GROUP + member
        most, total = _total(totals, plane, parts, query, PARTS)
        logit = tl.load(logits + query * count + place, mask=known, other=float("inf"))
        # What is not kept comes behind what draws nothing.
        share = tl.where(logit == float("-inf"), logit, tl.exp(logit - most) / total)
        if EACH:
            tl.store(scores + query * width + position, share, mask=inside)
        else:
            summed += share
    if not EACH:
        tl.store(scores + (row * heads + head) * width + position, summed, mask=inside)
