"""Search of the cluster index on CUDA in four launches, without a sort: what is before a thing is counted.

Whether a unit is kept, a cluster's chunks are taken, and where a chunk's tokens go all hang on sums over what comes
before it in some order. At a few hundred candidates, comparing all pairs is cheaper than sorting them.
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
"""Coarse units that a program bounds at a time."""
RANKED = 8
"""Coarse units that a program ranks at a time."""
CANDIDATES = 32
"""Clusters that it bounds at a time."""
TAKEN = 16
"""Clusters whose chunks a program places at a time."""
RIVALS = 512
"""Units, clusters or chunks that those of a program are compared with at a time."""
MEMBERS = 4
"""Chunks of each cluster that are read at a time."""
CHUNKS = 32
"""Chunks whose tokens a program writes."""
TOKENS = 256
"""Places of a set that a program fills with what is in no chunk."""
STEP = 16
"""Tokens of each chunk that are written at a time."""
PROGRAMS = 2048
"""Of a launch, about: those of rows that are not searched cost their start."""


def cluster_search(
    q: Tensor, tree: ClusterTree, slots: Tensor, seq_lens: Tensor, budget: int, sinks: int, units: int | None,
    widths: SearchWidths,
) -> Selection:  # fmt: skip
    batch, (_, heads, count, head_dim) = q.shape[0], tree.centroids.shape
    parents, pairs, device = tree.unit_tokens.shape[2], batch * heads, q.device
    clusters = min(widths.clusters, count)
    # A chunk has a token or more.
    chunks = min(widths.chunks, tree.members.shape[2], max(budget - sinks, 1))
    span = _stored_heads(tree)
    group = q.shape[1] // heads
    inner = triton.next_power_of_2(head_dim)
    unit_keys = torch.empty((pairs, parents), dtype=torch.int64, device=device)
    unit_weights = torch.empty_like(unit_keys)
    keys = torch.empty((pairs, clusters), dtype=torch.int64, device=device)
    weights = torch.empty_like(keys)
    opens = torch.empty((pairs, clusters), dtype=torch.int32, device=device)
    found = torch.empty((pairs,), dtype=torch.int32, device=device)
    starts = torch.empty((pairs, chunks), dtype=torch.int32, device=device)
    lengths = torch.empty_like(starts)
    ids = torch.empty((batch, heads, widths.tokens), dtype=torch.int32, device=device)
    counts = torch.empty((batch, heads), dtype=torch.int32, device=device)

    query = (q, *q.stride())
    row = (tree.ends, slots.contiguous(), seq_lens.contiguous(), budget, heads, span)
    listed = (tree.members, tree.edges, tree.members.shape[2], tree.edges.shape[1])
    candidates = (keys, weights, opens, found, clusters)
    ranked = (unit_keys, unit_weights, parents)
    sizes = {"GROUP": group, "HEAD_DIM": head_dim, "INNER": inner}
    most = max(PROGRAMS // max(pairs, 1), 1)
    with torch.cuda.device_of(q):
        _bound_units[(pairs, min(triton.cdiv(parents, UNITS), most))](
            *(*query, tree.unit_centroids, tree.unit_radii, tree.unit_tokens, tree.unit_offsets, *ranked, *row),
            *(found, lengths, chunks),
            **sizes,
            BY_TOKENS=units is None,
            BLOCK=UNITS,
            CHUNKS=RIVALS,
        )
        _bound_clusters[(pairs, min(triton.cdiv(parents, RANKED), most))](
            *(*query, *ranked, tree.unit_offsets, 4 * budget if units is None else units),
            *(tree.centroids, tree.radii, tree.numbers, tree.offsets, count, *listed, *row, *candidates),
            **sizes,
            UNITS=RANKED,
            RIVALS=RIVALS,
            BLOCK=CANDIDATES,
            MEMBERS=MEMBERS,
        )
        _take_chunks[(pairs, min(triton.cdiv(clusters, TAKEN), most))](
            *(*candidates, *listed, *row, sinks, starts, lengths, chunks),
            BLOCK=TAKEN,
            RIVALS=RIVALS,
            MEMBERS=MEMBERS,
        )
        _write_tokens[(pairs, max(triton.cdiv(chunks, CHUNKS), triton.cdiv(widths.tokens, TOKENS)))](
            *(starts, lengths, chunks, *row, sinks, ids, counts, widths.tokens),
            BLOCK=CHUNKS,
            RIVALS=RIVALS,
            TOKENS=TOKENS,
            STEP=STEP,
        )
    return Selection(ids, counts)


def _stored_heads(tree: ClusterTree) -> int:
    """How many heads a slot of the tree's storage has: a tree of some heads is a view of one of all."""
    slots, heads, count = tree.radii.shape
    span = tree.radii.stride(0) // count if slots > 1 else heads
    for name, tensor in tree.tensors().items():
        step = 1
        for dim in reversed(range(tensor.dim())):
            if tensor.shape[dim] > 1 and tensor.stride(dim) != step:
                raise KernelError(
                    f"cluster_search: {name} {list(tensor.shape)} has strides {tensor.stride()}; "
                    "implementation 'triton' reads a contiguous tree or some heads of one"
                )
            step *= span if dim == 1 and tensor.dim() > 2 else tensor.shape[dim]
    return span


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
def _before(
    keys: tl.tensor, weights: tl.tensor, count: tl.tensor, ranks: tl.tensor, BLOCK: tl.constexpr, RIVALS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """What those of the `count` keys that are before each of `ranks` weigh together, int64 `[BLOCK]`."""
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, count, RIVALS):
        rivals = start + tl.arange(0, RIVALS)
        # Nothing weighs what is absent, so that its rank does not matter.
        rival_ranks = tl.load(keys + rivals, mask=rivals < count, other=0)
        rival_weights = tl.load(weights + rivals, mask=rivals < count, other=0)
        total += tl.sum(tl.where(rival_ranks[None, :] > ranks[:, None], rival_weights[None, :], 0), axis=1)
    return total


@triton.jit(
    do_not_specialize=["stride_row", "stride_head", "stride_dim", "parents", "budget", "heads", "span", "chunks"]
)
def _bound_units(
    q: tl.tensor, stride_row: tl.tensor, stride_head: tl.tensor, stride_dim: tl.tensor, unit_centroids: tl.tensor,
    unit_radii: tl.tensor, unit_tokens: tl.tensor, unit_offsets: tl.tensor, unit_keys: tl.tensor,
    unit_weights: tl.tensor, parents: tl.tensor, ends: tl.tensor, slots: tl.tensor, seq_lens: tl.tensor,
    budget: tl.tensor, heads: tl.tensor, span: tl.tensor, found: tl.tensor, lengths: tl.tensor, chunks: tl.tensor,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, INNER: tl.constexpr, BY_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """Ranks of all units of a head, in one number what each counts and its clusters; and an empty list of chunks."""
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    slot = tl.load(slots + row).to(tl.int64)
    if (tl.load(ends + slot) == 0) | (tl.load(seq_lens + row) <= budget):
        return
    if tl.program_id(1) == 0:
        tl.store(found + pair, 0)
        for start in range(0, chunks, CHUNKS):
            numbers = start + tl.arange(0, CHUNKS)
            tl.store(lengths + pair * chunks + numbers, tl.zeros((CHUNKS,), dtype=tl.int32), mask=numbers < chunks)
    node = slot * span + head
    stored, firsts = node * parents, unit_offsets + node * (parents + 1)
    query, norm = _query(q, stride_row, stride_head, stride_dim, row, head, GROUP, HEAD_DIM, INNER)
    for start in range(tl.program_id(1) * BLOCK, parents, tl.num_programs(1) * BLOCK):
        units = start + tl.arange(0, BLOCK)
        present = units < parents
        tokens = tl.load(unit_tokens + stored + units, mask=present, other=0)
        filled = tokens > 0
        bounds = _bounds(
            query, norm, unit_centroids + stored * HEAD_DIM, unit_radii + stored, units, filled, HEAD_DIM, INNER
        )
        size = tl.load(firsts + units + 1, mask=filled, other=0) - tl.load(firsts + units, mask=filled, other=0)
        if not BY_TOKENS:
            tokens = filled.to(tl.int32)
        tl.store(unit_keys + pair * parents + units, _keys(bounds, units), mask=present)
        tl.store(unit_weights + pair * parents + units, (tokens.to(tl.int64) << 32) + size, mask=present)


@triton.jit(
    do_not_specialize=[
        "stride_row", "stride_head", "stride_dim", "parents", "limit", "count", "capacity", "edges_room", "budget",
        "heads", "span", "clusters"
    ]
)  # fmt: skip
def _bound_clusters(
    q: tl.tensor, stride_row: tl.tensor, stride_head: tl.tensor, stride_dim: tl.tensor, unit_keys: tl.tensor,
    unit_weights: tl.tensor, parents: tl.tensor, unit_offsets: tl.tensor, limit: tl.tensor, centroids: tl.tensor,
    radii: tl.tensor, numbers: tl.tensor, offsets: tl.tensor, count: tl.tensor, members: tl.tensor, edges: tl.tensor,
    capacity: tl.tensor, edges_room: tl.tensor, ends: tl.tensor, slots: tl.tensor, seq_lens: tl.tensor,
    budget: tl.tensor, heads: tl.tensor, span: tl.tensor, keys: tl.tensor, weights: tl.tensor, opens: tl.tensor,
    found: tl.tensor, clusters: tl.tensor,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, INNER: tl.constexpr, UNITS: tl.constexpr, RIVALS: tl.constexpr,
    BLOCK: tl.constexpr, MEMBERS: tl.constexpr,
) -> None:  # fmt: skip
    """Ranks of the kept units' clusters, their first members, and in one number how many tokens and chunks they have.

    A unit is kept while those before it hold less than the limit; its clusters follow theirs.
    """
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    slot = tl.load(slots + row).to(tl.int64)
    if (tl.load(ends + slot) == 0) | (tl.load(seq_lens + row) <= budget):
        return
    node = slot * span + head
    query, norm = _query(q, stride_row, stride_head, stride_dim, row, head, GROUP, HEAD_DIM, INNER)
    unit_keys += pair * parents
    unit_weights += pair * parents
    for begin in range(tl.program_id(1) * UNITS, parents, tl.num_programs(1) * UNITS):
        units = begin + tl.arange(0, UNITS)
        weight = tl.load(unit_weights + units, mask=units < parents, other=0)
        if tl.max(weight, axis=0) > 0:
            ranks = tl.load(unit_keys + units, mask=weight > 0, other=0)
            before = _before(unit_keys, unit_weights, parents, ranks, UNITS, RIVALS)
            size = tl.where((weight > 0) & ((before >> 32) < limit), weight.to(tl.int32), 0)
            turn = before.to(tl.int32)
            first = tl.load(unit_offsets + node * (parents + 1) + units, mask=size > 0, other=0)
            own = tl.cumsum(size, axis=0) - size
            kept = tl.sum(size, axis=0)
            if kept > 0:
                tl.atomic_max(found + pair, tl.max(tl.where(size > 0, turn + size, 0), axis=0))
            for start in range(0, kept, BLOCK):
                lane = start + tl.arange(0, BLOCK)
                inside = (lane[:, None] >= own[None, :]) & (lane[:, None] < (own + size)[None, :])
                at = lane + tl.sum(tl.where(inside, (first - own)[None, :], 0), axis=1)
                numbered = lane + tl.sum(tl.where(inside, (turn - own)[None, :], 0), axis=1)
                there = (lane < kept) & (numbered < clusters)
                bounds = _bounds(
                    query, norm, centroids + node * count * HEAD_DIM, radii + node * count, at, there, HEAD_DIM, INNER
                )
                found_ranks = _keys(bounds, tl.load(numbers + node * count + at, mask=there, other=0))
                opening = tl.load(offsets + node * (count + 1) + at, mask=there, other=0)
                held = tl.load(offsets + node * (count + 1) + at + 1, mask=there, other=0) - opening
                total = tl.zeros((BLOCK,), dtype=tl.int32)
                for member in range(0, tl.max(held, axis=0), MEMBERS):
                    extents = _lengths(
                        members + node * capacity, edges + slot * edges_room, opening, held, member, MEMBERS
                    )
                    total += tl.sum(extents[1], axis=1)
                out = pair * clusters + numbered
                tl.store(keys + out, found_ranks, mask=there)
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


@triton.jit(do_not_specialize=["clusters", "capacity", "edges_room", "budget", "heads", "span", "sinks", "chunks"])
def _take_chunks(
    keys: tl.tensor, weights: tl.tensor, opens: tl.tensor, found: tl.tensor, clusters: tl.tensor,
    members: tl.tensor, edges: tl.tensor, capacity: tl.tensor, edges_room: tl.tensor,
    ends: tl.tensor, slots: tl.tensor, seq_lens: tl.tensor, budget: tl.tensor, heads: tl.tensor, span: tl.tensor,
    sinks: tl.tensor, starts: tl.tensor, lengths: tl.tensor, chunks: tl.tensor,
    BLOCK: tl.constexpr, RIVALS: tl.constexpr, MEMBERS: tl.constexpr,
) -> None:  # fmt: skip
    """Chunks of clusters in order of rank until the next one does not fit: each to its place in that order."""
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    slot = tl.load(slots + row).to(tl.int64)
    end, length = tl.load(ends + slot), tl.load(seq_lens + row)
    if (end == 0) | (length <= budget):
        return
    candidates = tl.minimum(tl.load(found + pair), clusters)
    room, node = budget - sinks - (length - end), slot * span + head
    keys += pair * clusters
    weights += pair * clusters
    for begin in range(tl.program_id(1) * BLOCK, candidates, tl.num_programs(1) * BLOCK):
        numbered = begin + tl.arange(0, BLOCK)
        ranks = tl.load(keys + numbered, mask=numbered < candidates, other=0)
        before = _before(keys, weights, candidates, ranks, BLOCK, RIVALS)
        tokens, turn = (before >> 32).to(tl.int32), before.to(tl.int32)
        own = (numbered < candidates) & (tokens < room) & (turn < chunks)
        size = tl.load(weights + numbered, mask=own, other=0).to(tl.int32)
        first = tl.load(opens + pair * clusters + numbered, mask=size > 0, other=0)
        for start in range(0, tl.max(size, axis=0), MEMBERS):
            position, extent = _lengths(
                members + node * capacity, edges + slot * edges_room, first, size, start, MEMBERS
            )
            stop = tokens[:, None] + tl.cumsum(extent, axis=1)
            place = turn[:, None] + start + tl.arange(0, MEMBERS)[None, :]
            taken = (extent > 0) & (stop <= room) & (place < chunks)
            tl.store(starts + pair * chunks + place, position, mask=taken)
            tl.store(lengths + pair * chunks + place, extent, mask=taken)
            tokens += tl.sum(extent, axis=1)


@triton.jit(do_not_specialize=["chunks", "budget", "heads", "span", "sinks", "width"])
def _write_tokens(
    starts: tl.tensor, lengths: tl.tensor, chunks: tl.tensor, ends: tl.tensor, slots: tl.tensor, seq_lens: tl.tensor,
    budget: tl.tensor, heads: tl.tensor, span: tl.tensor, sinks: tl.tensor, ids: tl.tensor, counts: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr, RIVALS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    """Sinks, the taken chunks by position, what is in no chunk, then -1."""
    pair = tl.program_id(0).to(tl.int64)
    row = pair // heads
    end, length = tl.load(ends + tl.load(slots + row)), tl.load(seq_lens + row)
    indexed = (end > 0) & (length > budget)
    head, tail = tl.where(indexed, sinks, 0), tl.where(indexed, end, 0)
    listed = tl.where(indexed, chunks, 0)
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    extent = tl.load(lengths + pair * chunks + numbers, mask=numbers < listed, other=0)
    position = tl.load(starts + pair * chunks + numbers, mask=extent > 0, other=0)
    place = tl.zeros((BLOCK,), dtype=tl.int32) + head
    total = 0
    for start in range(0, listed, RIVALS):
        rivals = start + tl.arange(0, RIVALS)
        rival_extent = tl.load(lengths + pair * chunks + rivals, mask=rivals < listed, other=0)
        rival_position = tl.load(starts + pair * chunks + rivals, mask=rival_extent > 0, other=0)
        before = rival_position[None, :] < position[:, None]
        place += tl.sum(tl.where(before, rival_extent[None, :], 0), axis=1)
        total += tl.sum(rival_extent, axis=0)
    for start in range(0, tl.max(extent, axis=0), STEP):
        inner = start + tl.arange(0, STEP)
        target = place[:, None] + inner[None, :]
        inside = (inner[None, :] < extent[:, None]) & (target < width)
        tl.store(ids + pair * width + target, position[:, None] + inner[None, :], mask=inside)

    # The rest of the set, by place: what stands before the chunks and behind them.
    places = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    behind = head + total
    size = behind + length - tail
    token = tl.where(places < head, places, tl.where(places < size, places - behind + tail, -1))
    tl.store(ids + pair * width + places, token, mask=((places < head) | (places >= behind)) & (places < width))
    if tl.program_id(1) == 0:
        tl.store(counts + pair, size)
