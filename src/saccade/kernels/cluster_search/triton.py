"""Search of the cluster index on CUDA in four launches, without a sort: what is before a thing is counted.

Whether a unit is kept, a cluster's chunks are taken, and where a chunk's tokens go all hang on sums over what comes
before it in some order. All pairs are compared, but of units and clusters those are left out first that too much is
before, which a few rounds of counting find: nine of ten, or three of four. The way taken changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._cluster_tree import ClusterTree, SearchWidths
from saccade.types import Selection

UNITS = 16
"""Units that a program bounds at a time."""
CANDIDATES = 32
"""Clusters that it bounds at a time."""
MEMBERS = 8
"""Clusters of each unit, or chunks of each cluster, that are read at a time."""
PROGRAMS = 2048
"""Of a launch that bounds, about: those that find nothing to do cost their start."""
WARPS = 4
"""Of the one program that ranks what a head has."""
PART = 512
"""Clusters or places of a set that it looks at together: there are about 300 of the one."""
UNITS_PART = 1024
"""Units that it looks at together: places without one lie among them."""
SPARE = 4
"""What is left weighs at most a part of so many more than it must: further rounds cost more."""
RANKED = 64
"""Units, clusters or chunks that are ranked at a time."""
RIVALS = 32
"""Those with which these are compared at a time."""
STEP = 16
"""Tokens of each chunk that are written at a time."""
MOST, LEAST = tl.constexpr(2**63 - 1), tl.constexpr(-(2**63))
"""Beyond all keys."""


def cluster_search(
    q: Tensor, tree: ClusterTree, slots: Tensor, seq_lens: Tensor, budget: int, sinks: int, widths: SearchWidths
) -> Selection:
    batch, (_, heads, count, head_dim) = q.shape[0], tree.centroids.shape
    parents, pairs, device = tree.unit_tokens.shape[2], batch * heads, q.device
    clusters = min(widths.clusters, count)
    # A chunk has a token or more.
    chunks = min(widths.chunks, tree.members.shape[2], max(budget - sinks, 1))
    apart = tree.apart()
    if apart is not None:
        raise KernelError(
            f"cluster_search: {apart}; implementation 'triton' reads a contiguous tree or some heads of one"
        )

    def integers(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty((*sizes[:-1], pairs, sizes[-1]), dtype=dtype, device=device)

    ranked, candidates = ((*integers(2, n, dtype=torch.int64), integers(n)) for n in (parents, clusters))
    listed, found, starts, lengths = integers(clusters), integers(1), *integers(2, chunks)
    ids, counts = integers(widths.tokens), integers(1)

    query = (q, *q.stride())
    slots, shares = slots.contiguous(), (heads, tree.stored_heads)
    row = (tree.ends, slots, seq_lens.contiguous(), budget, *shares)
    members = (tree.members, tree.edges, tree.members.shape[2], tree.edges.shape[1])
    sizes = {"GROUP": q.shape[1] // heads, "HEAD_DIM": head_dim, "INNER": triton.next_power_of_2(head_dim)}
    narrowed = {"SPARE": SPARE, "BLOCK": RANKED, "RIVALS": RIVALS, "MEMBERS": MEMBERS, "num_warps": WARPS}
    # One more: the last part of a tree is often empty.
    most = PROGRAMS // max(pairs, 1) + 1
    with torch.cuda.device_of(q):
        _bound_units[(pairs, min(triton.cdiv(parents, UNITS), most))](
            *(*query, tree.unit_centroids, tree.unit_radii, tree.unit_tokens, tree.unit_offsets),
            *(*ranked, parents, *row),
            **sizes,
            BLOCK=UNITS,
        )
        _keep_units[(pairs,)](
            *(*ranked, parents, *row, 4 * budget, listed, found, clusters),
            **narrowed,
            PART=UNITS_PART,
        )
        _bound_clusters[(pairs, min(triton.cdiv(clusters, CANDIDATES), most))](
            *(*query, listed, found, clusters, tree.centroids, tree.radii, tree.numbers, tree.offsets, count),
            *(*members, slots, *shares, *candidates),
            **sizes,
            BLOCK=CANDIDATES,
            MEMBERS=MEMBERS,
        )
        _write_sets[(pairs,)](
            *(*candidates, found, clusters, *members, *row, sinks, starts, lengths, chunks, ids, counts, widths.tokens),
            **narrowed,
            PART=PART,
            STEP=STEP,
        )
    return Selection(ids.view(batch, heads, -1), counts.view(batch, heads))


@triton.jit
def _query(
    q: tl.tensor, stride_row: tl.tensor, stride_head: tl.tensor, stride_dim: tl.tensor, row: tl.tensor, head: tl.tensor,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, INNER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Mean of a group's queries, float32 `[INNER]`, and its length."""
    dims = tl.arange(0, INNER)
    place = q + row.to(tl.int64) * stride_row + dims * stride_dim
    total = tl.zeros((INNER,), dtype=tl.float32)
    for member in tl.static_range(GROUP):
        total += tl.load(place + (head * GROUP + member) * stride_head, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    mean = tl.div_rn(total, tl.full((INNER,), GROUP, dtype=tl.float32))
    return mean, tl.sqrt_rn(tl.sum(mean * mean, axis=0))


@triton.jit
def _bounds(
    query: tl.tensor, norm: tl.tensor, centroids: tl.tensor, radii: tl.tensor, places: tl.tensor, present: tl.tensor,
    HEAD_DIM: tl.constexpr, INNER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """q·centroid + |q|·radius of the nodes at `places` of a head, float32."""
    dims = tl.arange(0, INNER)
    inside = present[:, None] & (dims < HEAD_DIM)[None, :]
    near = tl.load(centroids + places[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.sum(near * query[None, :], axis=1) + norm * tl.load(radii + places, mask=present, other=0.0)


@triton.jit
def _keys(bounds: tl.tensor, numbers: tl.tensor) -> tl.tensor:
    """Unique int64, larger is better: the bound in the high half, the inverted number in the low half."""
    bits = tl.where(bounds == 0.0, 0.0, bounds).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    # Larger bits of a negative number mean a smaller one: all but the sign are inverted.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - numbers).to(tl.int64)


@triton.jit
def _narrow(
    keys: tl.tensor, weights: tl.tensor, opens: tl.tensor, count: tl.tensor, limit: tl.tensor, PART: tl.constexpr,
    SPARE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """How many are left, and moved to the front in order, of `count`: all with less than the limit before them.

    Those from a floor on, which rises while much more than the limit is left: of a few the highest that leaves it.
    """
    low, high = tl.full((PART,), MOST, tl.int64), tl.full((PART,), LEAST, tl.int64)
    total = tl.zeros((PART,), dtype=tl.int32)
    for start in range(0, count, PART):
        place = start + tl.arange(0, PART)
        weight = tl.load(weights + place, mask=place < count, other=0)
        key = tl.load(keys + place, mask=place < count, other=0)
        low = tl.minimum(low, tl.where(weight > 0, key, MOST))
        high = tl.maximum(high, tl.where(weight > 0, key, LEAST))
        total += (weight >> 32).to(tl.int32)
    low, high, reaching = tl.min(low, axis=0), tl.max(high, axis=0), tl.sum(total, axis=0)
    # First near the highest, as far apart as 1.0 and 1.5: between it and a negative one most keys are of tiny bounds.
    step = tl.full((), 1 << 54, tl.int64)
    while (reaching > limit + limit // SPARE) & (low < high):
        apart = tl.minimum(tl.maximum((high >> 2) - (low >> 2), 1), step)
        first, second, third = high - apart, high - 2 * apart, high - 3 * apart
        above = tl.zeros((PART,), dtype=tl.int32)
        upper, middle, lower = above, above, above
        for start in range(0, count, PART):
            place = start + tl.arange(0, PART)
            key = tl.load(keys + place, mask=place < count, other=0)
            tokens = (tl.load(weights + place, mask=place < count, other=0) >> 32).to(tl.int32)
            above += tl.where(key >= high, tokens, 0)
            upper += tl.where(key >= first, tokens, 0)
            middle += tl.where(key >= second, tokens, 0)
            lower += tl.where(key >= third, tokens, 0)
        # From the lowest to the highest: the last that leaves the limit.
        top = high
        low, high, reaching = _raise(low, high, reaching, third, tl.sum(lower, axis=0), limit)
        low, high, reaching = _raise(low, high, reaching, second, tl.sum(middle, axis=0), limit)
        low, high, reaching = _raise(low, high, reaching, first, tl.sum(upper, axis=0), limit)
        low, high, reaching = _raise(low, high, reaching, top, tl.sum(above, axis=0), limit)
        step = tl.full((), MOST, tl.int64)
    left = 0
    for start in range(0, count, PART):
        place = start + tl.arange(0, PART)
        weight = tl.load(weights + place, mask=place < count, other=0)
        key = tl.load(keys + place, mask=weight > 0, other=0)
        stays = (weight > 0) & (key >= low)
        opening = tl.load(opens + place, mask=stays, other=0)
        target = left + tl.cumsum(stays.to(tl.int32), axis=0) - 1
        left += tl.sum(stays.to(tl.int32), axis=0)
        # All have been read before one is overwritten, and written before one is read again.
        tl.debug_barrier()
        tl.store(keys + target, key, mask=stays)
        tl.store(weights + target, weight, mask=stays)
        tl.store(opens + target, opening, mask=stays)
    tl.debug_barrier()
    return left


@triton.jit
def _raise(
    low: tl.tensor, high: tl.tensor, reaching: tl.tensor, floor: tl.tensor, left: tl.tensor, limit: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The range of the wanted floor, and what its lower end leaves, once it is known what `floor` leaves."""
    enough = left >= limit
    return (
        tl.where(enough, tl.maximum(low, floor), low),
        tl.where(enough, high, tl.minimum(high, floor - 1)),
        tl.where(enough, tl.minimum(reaching, left), reaching),
    )


@triton.jit
def _before(
    keys: tl.tensor, weights: tl.tensor, count: tl.tensor, ranks: tl.tensor, BLOCK: tl.constexpr, RIVALS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """What those of the `count` keys that are before each of `ranks`, the higher, weigh together, `[BLOCK]`."""
    total = tl.zeros((RIVALS, BLOCK), dtype=weights.dtype.element_ty)
    for start in range(0, count, RIVALS):
        rivals = start + tl.arange(0, RIVALS)
        # Nothing weighs what is absent, so that its rank does not matter.
        rival_ranks = tl.load(keys + rivals, mask=rivals < count, other=0)
        rival_weights = tl.load(weights + rivals, mask=rivals < count, other=0)
        total += tl.where(rival_ranks[:, None] > ranks[None, :], rival_weights[:, None], 0)
    # Once at the end: threads need not meet in between.
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["stride_row", "stride_head", "stride_dim", "parents", "budget", "heads", "span"])
def _bound_units(
    q: tl.tensor, stride_row: tl.tensor, stride_head: tl.tensor, stride_dim: tl.tensor, unit_centroids: tl.tensor,
    unit_radii: tl.tensor, unit_tokens: tl.tensor, unit_offsets: tl.tensor, keys: tl.tensor, weights: tl.tensor,
    opens: tl.tensor, parents: tl.tensor, ends: tl.tensor, slots: tl.tensor, seq_lens: tl.tensor, budget: tl.tensor,
    heads: tl.tensor, span: tl.tensor,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Ranks of all units of a head, in one number what each counts and its clusters, and the first of these."""
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    slot = tl.load(slots + row).to(tl.int64)
    end, length = tl.load(ends + slot), tl.load(seq_lens + row)
    # Before it is known to be wanted: one wait less.
    query, norm = _query(q, stride_row, stride_head, stride_dim, row, head, GROUP, HEAD_DIM, INNER)
    if (end == 0) | (length <= budget):
        return
    node = slot * span + head
    stored, firsts = node * parents, unit_offsets + node * (parents + 1)
    for start in range(tl.program_id(1) * BLOCK, parents, tl.num_programs(1) * BLOCK):
        units = start + tl.arange(0, BLOCK)
        present = units < parents
        tokens = tl.load(unit_tokens + stored + units, mask=present, other=0)
        filled = tokens > 0
        bounds = _bounds(
            query, norm, unit_centroids + stored * HEAD_DIM, unit_radii + stored, units, filled, HEAD_DIM, INNER
        )
        first = tl.load(firsts + units, mask=filled, other=0)
        size = tl.load(firsts + units + 1, mask=filled, other=0) - first
        out = pair * parents + units
        tl.store(keys + out, _keys(bounds, units), mask=present)
        tl.store(weights + out, (tokens.to(tl.int64) << 32) + size, mask=present)
        tl.store(opens + out, first, mask=present)


@triton.jit(do_not_specialize=["parents", "budget", "heads", "span", "limit", "clusters"])
def _keep_units(
    keys: tl.tensor, weights: tl.tensor, opens: tl.tensor, parents: tl.tensor, ends: tl.tensor, slots: tl.tensor,
    seq_lens: tl.tensor, budget: tl.tensor, heads: tl.tensor, span: tl.tensor, limit: tl.tensor, listed: tl.tensor,
    found: tl.tensor, clusters: tl.tensor,
    PART: tl.constexpr, SPARE: tl.constexpr, BLOCK: tl.constexpr, RIVALS: tl.constexpr,
    MEMBERS: tl.constexpr,
) -> None:  # fmt: skip
    """The clusters of units that are kept, in order: those before a unit hold less than the limit."""
    pair = tl.program_id(0).to(tl.int64)
    row = pair // heads
    if (tl.load(ends + tl.load(slots + row)) == 0) | (tl.load(seq_lens + row) <= budget):
        tl.store(found + pair, 0)
        return
    keys, weights, opens = keys + pair * parents, weights + pair * parents, opens + pair * parents
    left = _narrow(keys, weights, opens, parents, limit, PART, SPARE)
    total = 0
    for begin in range(0, left, BLOCK):
        units = begin + tl.arange(0, BLOCK)
        ranks = tl.load(keys + units, mask=units < left, other=0)
        before = _before(keys, weights, left, ranks, BLOCK, RIVALS)
        kept = (units < left) & ((before >> 32) < limit)
        size = tl.load(weights + units, mask=kept, other=0).to(tl.int32)
        first = tl.load(opens + units, mask=kept, other=0)
        total += tl.sum(size, axis=0)
        for start in range(0, tl.max(size, axis=0), MEMBERS):
            inner = start + tl.arange(0, MEMBERS)[None, :]
            target = before.to(tl.int32)[:, None] + inner
            inside = (inner < size[:, None]) & (target < clusters)
            tl.store(listed + pair * clusters + target, first[:, None] + inner, mask=inside)
    tl.store(found + pair, tl.minimum(total, clusters))


@triton.jit(
    do_not_specialize=[
        "stride_row", "stride_head", "stride_dim", "clusters", "count", "capacity", "edges_room", "heads", "span"
    ]
)  # fmt: skip
def _bound_clusters(
    q: tl.tensor, stride_row: tl.tensor, stride_head: tl.tensor, stride_dim: tl.tensor, listed: tl.tensor,
    found: tl.tensor, clusters: tl.tensor, centroids: tl.tensor, radii: tl.tensor, numbers: tl.tensor,
    offsets: tl.tensor, count: tl.tensor, members: tl.tensor, edges: tl.tensor, capacity: tl.tensor,
    edges_room: tl.tensor, slots: tl.tensor, heads: tl.tensor, span: tl.tensor, keys: tl.tensor, weights: tl.tensor,
    opens: tl.tensor,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, MEMBERS: tl.constexpr,
) -> None:  # fmt: skip
    """Ranks of listed clusters, their first members, and in one number how many tokens and chunks they have."""
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    slot, candidates = tl.load(slots + row).to(tl.int64), tl.load(found + pair)
    node = slot * span + head
    query, norm = _query(q, stride_row, stride_head, stride_dim, row, head, GROUP, HEAD_DIM, INNER)
    for start in range(tl.program_id(1) * BLOCK, candidates, tl.num_programs(1) * BLOCK):
        lane = start + tl.arange(0, BLOCK)
        there = lane < candidates
        out = pair * clusters + lane
        at = tl.load(listed + out, mask=there, other=0)
        bounds = _bounds(
            query, norm, centroids + node * count * HEAD_DIM, radii + node * count, at, there, HEAD_DIM, INNER
        )
        opening = tl.load(offsets + node * (count + 1) + at, mask=there, other=0)
        held = tl.load(offsets + node * (count + 1) + at + 1, mask=there, other=0) - opening
        total = tl.zeros((BLOCK,), dtype=tl.int32)
        for member in range(0, tl.max(held, axis=0), MEMBERS):
            extents = _lengths(members + node * capacity, edges + slot * edges_room, opening, held, member, MEMBERS)
            total += tl.sum(extents[1], axis=1)
        tl.store(keys + out, _keys(bounds, tl.load(numbers + node * count + at, mask=there, other=0)), mask=there)
        tl.store(weights + out, (total.to(tl.int64) << 32) + held, mask=there)
        tl.store(opens + out, opening, mask=there)


@triton.jit
def _lengths(
    members: tl.tensor, edges: tl.tensor, begin: tl.tensor, size: tl.tensor, start: tl.tensor, MEMBERS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Starts and lengths of members `start..start + MEMBERS` of clusters; length 0: none."""
    member = start + tl.arange(0, MEMBERS)
    inside = member[None, :] < size[:, None]
    chunk = tl.load(members + begin[:, None] + member[None, :], mask=inside, other=0)
    position = tl.load(edges + chunk, mask=inside, other=0)
    return position, tl.load(edges + chunk + 1, mask=inside, other=0) - position


@triton.jit(
    do_not_specialize=["clusters", "capacity", "edges_room", "budget", "heads", "span", "sinks", "chunks", "width"]
)
def _write_sets(
    keys: tl.tensor, weights: tl.tensor, opens: tl.tensor, found: tl.tensor, clusters: tl.tensor, members: tl.tensor,
    edges: tl.tensor, capacity: tl.tensor, edges_room: tl.tensor, ends: tl.tensor, slots: tl.tensor,
    seq_lens: tl.tensor, budget: tl.tensor, heads: tl.tensor, span: tl.tensor, sinks: tl.tensor, starts: tl.tensor,
    lengths: tl.tensor, chunks: tl.tensor, ids: tl.tensor, counts: tl.tensor, width: tl.tensor,
    PART: tl.constexpr, SPARE: tl.constexpr, BLOCK: tl.constexpr, RIVALS: tl.constexpr,
    MEMBERS: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    """Sinks, chunks of clusters in order of rank until the next one does not fit, what is in no chunk, then -1."""
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    candidates, slot = tl.load(found + pair), tl.load(slots + row).to(tl.int64)
    end, length = tl.load(ends + slot), tl.load(seq_lens + row)
    indexed = (end > 0) & (length > budget)
    begins, tail = tl.where(indexed, sinks, 0), tl.where(indexed, end, 0)
    room, node = budget - sinks - (length - end), slot * span + head
    keys, weights, opens = keys + pair * clusters, weights + pair * clusters, opens + pair * clusters
    starts, lengths, ids = starts + pair * chunks, lengths + pair * chunks, ids + pair * width
    left = _narrow(keys, weights, opens, candidates, room, PART, SPARE)
    taken, behind = 0, begins
    for begin in range(0, left, BLOCK):
        numbered = begin + tl.arange(0, BLOCK)
        ranks = tl.load(keys + numbered, mask=numbered < left, other=0)
        before = _before(keys, weights, left, ranks, BLOCK, RIVALS)
        tokens, turn = (before >> 32).to(tl.int32), before.to(tl.int32)
        own = (numbered < left) & (tokens < room) & (turn < chunks)
        size = tl.load(weights + numbered, mask=own, other=0).to(tl.int32)
        first = tl.load(opens + numbered, mask=own, other=0)
        for start in range(0, tl.max(size, axis=0), MEMBERS):
            position, extent = _lengths(
                members + node * capacity, edges + slot * edges_room, first, size, start, MEMBERS
            )
            inner = start + tl.arange(0, MEMBERS)[None, :]
            place, stop = turn[:, None] + inner, tokens[:, None] + tl.cumsum(extent, axis=1)
            fits = (inner < size[:, None]) & (stop <= room) & (place < chunks)
            # Negative, so that the earlier is before the later.
            tl.store(starts + place, -position, mask=fits)
            tl.store(lengths + place, extent, mask=fits)
            taken += tl.sum(tl.sum(fits.to(tl.int32), axis=1), axis=0)
            behind += tl.sum(tl.sum(tl.where(fits, extent, 0), axis=1), axis=0)
            tokens += tl.sum(extent, axis=1)
    tl.debug_barrier()
    for begin in range(0, taken, BLOCK):
        numbered = begin + tl.arange(0, BLOCK)
        start = tl.load(starts + numbered, mask=numbered < taken, other=0)
        extent = tl.load(lengths + numbered, mask=numbered < taken, other=0)
        place = begins + _before(starts, lengths, taken, start, BLOCK, 2 * RIVALS)
        for step in range(0, tl.max(extent, axis=0), STEP):
            inner = step + tl.arange(0, STEP)[None, :]
            inside = (inner < extent[:, None]) & (place[:, None] + inner < width)
            tl.store(ids + place[:, None] + inner, inner - start[:, None], mask=inside)
    size = behind + length - tail
    for start in range(0, width, PART):
        places = start + tl.arange(0, PART)
        token = tl.where(places < begins, places, tl.where(places < size, places - behind + tail, -1))
        tl.store(ids + places, token, mask=((places < begins) | (places >= behind)) & (places < width))
    tl.store(counts + pair, size)
