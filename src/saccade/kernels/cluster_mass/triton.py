"""Scores by attention mass on CUDA in two launches: logits of sets with their sums in parts, then tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels._mass_tree import MassSettings, MassTree
from saccade.kernels._triton.operands import LEAST_DIM, LEAST_TILE, widened

SETS = 64
"""Sets of a program: enough for a tile of a tensor core, few enough to occupy all processors."""
TOKENS = 1024
"""Tokens of a program."""


def cluster_mass(q: Tensor, tree: MassTree, slots: Tensor, seq_lens: Tensor, settings: MassSettings) -> Tensor:
    (batch, query_heads, head_dim), (_, heads, count, _) = q.shape, tree.means.shape
    group, parts, pairs, width = query_heads // heads, triton.cdiv(count, SETS), batch * heads, settings.width

    def floats(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=q.device)

    logits, totals = floats(batch, query_heads, count), floats(2, batch, query_heads, parts)
    scores = floats(batch, query_heads if settings.each else heads, width)
    sums = (totals, parts, batch * query_heads * parts)
    with torch.cuda.device_of(q):
        _logits[(pairs, parts)](
            q, *q.stride(), tree.means, *tree.means.stride(), tree.sizes, tree.spreads, *tree.sizes.stride(),
            tree.used, slots, logits, *sums, count, heads, settings.scale, settings.spread,
            GROUP=group, TILE=max(LEAST_TILE, triton.next_power_of_2(group)), DIM=head_dim,
            INNER=max(LEAST_DIM, triton.next_power_of_2(head_dim)), WIDE=widened(q, tree.means), BLOCK=SETS,
            num_warps=4,
        )  # fmt: skip
        _tokens[(pairs, triton.cdiv(width, TOKENS))](
            logits, *sums, tree.labels, *tree.labels.stride(), tree.ends, slots, seq_lens, scores, count, heads, width,
            settings.sinks, tree.tokens, tree.sets, tree.labels.shape[2],
            GROUP=group, EACH=settings.each, PARTS=triton.next_power_of_2(parts), BLOCK=TOKENS, num_warps=4,
        )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=["parts", "plane", "count", "heads"])
def _logits(
    q: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, q_dim: tl.tensor, means: tl.tensor, m_slot: tl.tensor,
    m_head: tl.tensor, m_place: tl.tensor, m_dim: tl.tensor, sizes: tl.tensor, spreads: tl.tensor, s_slot: tl.tensor,
    s_head: tl.tensor, s_place: tl.tensor, used: tl.tensor, slots: tl.tensor, logits: tl.tensor, totals: tl.tensor,
    parts: tl.tensor, plane: tl.tensor, count: tl.tensor, heads: tl.tensor,
    scale: tl.tensor, spread: tl.tensor,
    GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Of a group's query heads and a part of the sets, and the largest and the sum of exp of the part."""
    pair, part = tl.program_id(0), tl.program_id(1)
    row, head = pair // heads, (pair % heads).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    filled = tl.load(used + slot)
    member = tl.arange(0, TILE)
    query, whose = head * GROUP + member, member < GROUP
    out = totals + (row * heads * GROUP + query) * parts + part
    if part * BLOCK >= filled:
        tl.store(out, float("-inf"), mask=whose)
        tl.store(out + plane, 0.0, mask=whose)
        return
    places = part * BLOCK + tl.arange(0, BLOCK)
    there = places < filled
    dims, wide = tl.arange(0, INNER), tl.arange(0, INNER) < DIM
    # [TILE, d] and [d, BLOCK]
    asked = tl.load(
        q + row.to(tl.int64) * q_row + query[:, None] * q_head + dims[None, :] * q_dim,
        mask=whose[:, None] & wide[None, :], other=0.0,
    )  # fmt: skip
    mean = tl.load(
        means + slot * m_slot + head * m_head + places[None, :] * m_place + dims[:, None] * m_dim,
        mask=there[None, :] & wide[:, None], other=0.0,
    )  # fmt: skip
    exact = asked.to(tl.float32)
    norm = tl.sqrt_rn(tl.sum(exact * exact, axis=1) / DIM)
    products = tl.dot(exact, mean.to(tl.float32), input_precision="ieee") if WIDE else tl.dot(asked, mean)
    inner = slot * s_slot + head * s_head + places * s_place
    size = tl.load(sizes + inner, mask=there, other=0)
    far = tl.load(spreads + inner, mask=there & (size > 0), other=0.0)
    found = scale * (products + spread * norm[:, None] * far[None, :]) + tl.log(tl.maximum(size, 1).to(tl.float32))
    found = tl.where((size > 0)[None, :], found, float("-inf"))
    target = logits + (row * heads * GROUP + query)[:, None] * count + places[None, :]
    tl.store(target, found, mask=whose[:, None] & there[None, :])
    most = tl.max(found, axis=1)
    # A part without any set has nothing to be compared with.
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


@triton.jit(do_not_specialize=["parts", "plane", "count", "heads", "width", "room"])
def _tokens(
    logits: tl.tensor, totals: tl.tensor, parts: tl.tensor, plane: tl.tensor, labels: tl.tensor, l_slot: tl.tensor,
    l_head: tl.tensor, l_place: tl.tensor, ends: tl.tensor, slots: tl.tensor, seq_lens: tl.tensor, scores: tl.tensor,
    count: tl.tensor, heads: tl.tensor, width: tl.tensor, sinks: tl.tensor, group_tokens: tl.tensor, sets: tl.tensor,
    room: tl.tensor,
    GROUP: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Each token has the share of its set: of every query head, or summed over the group."""
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
    place = label.to(tl.int32) + position // group_tokens * sets
    summed = tl.zeros((BLOCK,), dtype=tl.float32)
    for member in tl.static_range(GROUP):
        query = row * heads * GROUP + head * GROUP + member
        most, total = _total(totals, plane, parts, query, PARTS)
        logit = tl.load(logits + query * count + place, mask=known, other=float("inf"))
        share = tl.exp(logit - most) / total
        if EACH:
            tl.store(scores + query * width + position, share, mask=inside)
        else:
            summed += share
    if not EACH:
        tl.store(scores + (row * heads + head) * width + position, summed, mask=inside)
