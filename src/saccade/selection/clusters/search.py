"""Search of the cluster index: the best chunks by upper bounds on q·k (LycheeCluster, section 4.4).

In plain torch of fixed shapes: no host synchronisation, no pass over all tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels._flat import flatten
from ...kernels.topk.reference import ordered
from ...types import Selection
from .tree import ClusterTree

_LOWEST = torch.iinfo(torch.int64).min


class SearchWidths(NamedTuple):
    """Host bounds on what a search meets; narrower loses candidates.

    Clusters of the units that are kept, chunks that fit beside what is always attended to, tokens of a set.
    """

    clusters: int
    chunks: int
    tokens: int


def cluster_search(
    q: Tensor,
    tree: ClusterTree,
    seq_lens: Tensor,
    *,
    budget: int,
    sinks: int,
    widths: SearchWidths,
    slots: Tensor | None = None,
) -> Selection:
    """The set of each KV head: sinks, chunks found by bounds, what is in no chunk yet, and the current token.

    The query is the mean of its group. A unit's or cluster's bound is q·centroid + |q|·radius, in float32. Units are
    taken by bound (ties: the lower), the smallest number whose chunks hold 4 budgets of tokens; their clusters by
    bound (ties: the lower number); a cluster's chunks as they lie, until the next one does not fit.
    Rows of at most `budget` tokens, and rows that are not indexed, get all their tokens.

    Args:
        q: `[B, Hq, d]`, Hq a multiple of the tree's heads.
        tree: the index, of R slots.
        seq_lens: int32 `[B]`, tokens per row, the current one included.
        budget: tokens of a set.
        sinks: first tokens, in every set; the first chunk starts behind them.
        widths: host bounds; `tokens` gives the result its shape.
        slots: int32 `[B]`, the slot of the tree that a row searches; None: that of its own number.

    Returns:
        Tokens int32 `[B, H, widths.tokens]`, ascending, and their counts.
    """
    slots = torch.arange(len(tree.ends), device=q.device) if slots is None else slots.long()
    ends = tree.ends[slots]
    indexed = (ends > 0) & (seq_lens > budget)
    head = torch.where(indexed, sinks, 0)
    tail = torch.where(indexed, ends, 0)
    chunks = min(widths.chunks, tree.members.shape[2])
    ranked, sizes = _ranked(q, tree, slots, indexed, budget, widths.clusters, chunks)
    numbers, starts, lengths = _chunks(tree, slots, ranked, sizes, chunks)
    return fill_budget(numbers, starts, lengths, seq_lens, head=head, tail=tail, budget=budget, width=widths.tokens)


def _ranked(
    q: Tensor, tree: ClusterTree, slots: Tensor, indexed: Tensor, budget: int, clusters: int, chunks: int
) -> tuple[Tensor, Tensor]:
    """The best clusters of the best units, `[B, H, n]`: where they lie and how many chunks they have."""
    batch, (_, heads, count, head_dim) = q.shape[0], tree.centroids.shape
    query = q.float().reshape(batch, heads, -1, head_dim).mean(dim=2)
    norm = torch.linalg.vector_norm(query, dim=-1, keepdim=True)
    kept, sizes = _kept_units(query, norm, tree, slots, indexed, budget)
    # On CPU it costs nothing to see how many there are.
    clusters = min(clusters, max(int(sizes.sum(-1).max()), 1) if sizes.is_cpu else count)
    places = lay_out(kept, sizes, clusters)
    inside = places.clamp(min=0)
    sizes = (_of(tree.offsets, slots, inside + 1) - _of(tree.offsets, slots, inside)).long()
    absent = (places < 0) | (sizes == 0)
    flat = flatten(tree.centroids)
    corners = slots[:, None] * flat.page + torch.arange(heads, device=q.device) * flat.slot
    rows = (inside * flat.head + corners[..., None]).flatten()
    near = flat.table.index_select(0, rows).view(batch, heads, clusters, head_dim).float()
    bounds = _products(query, near) + norm * _of(tree.radii, slots, inside)
    numbers = _of(tree.numbers, slots, inside)
    # Unique keys, larger is better: the bound in the high half, the inverted number in the low half.
    keys = (ordered(bounds) * 2**32 + (2**31 - 1 - numbers)).masked_fill(absent, _LOWEST)
    best = torch.topk(keys, min(clusters, chunks), dim=-1).indices
    return inside.gather(-1, best), sizes.masked_fill(absent, 0).gather(-1, best)


def _kept_units(
    query: Tensor, norm: Tensor, tree: ClusterTree, slots: Tensor, indexed: Tensor, budget: int
) -> tuple[Tensor, Tensor]:
    """First cluster and number of clusters of every unit in order of its bound, no clusters where it is not kept."""
    bounds = _products(query, tree.unit_centroids[slots].float()) + norm * tree.unit_radii[slots]
    tokens, offsets = tree.unit_tokens[slots].long() * indexed[:, None, None], tree.unit_offsets[slots].long()
    order = bounds.masked_fill(tokens == 0, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    tokens, first = tokens.gather(-1, order), offsets.gather(-1, order)
    kept = tokens.cumsum(-1) - tokens < 4 * budget
    return first, (offsets.gather(-1, order + 1) - first) * (kept & (tokens > 0))


def _chunks(tree: ClusterTree, slots: Tensor, ranked: Tensor, sizes: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """Numbers, starts and lengths of the ranked clusters' first `chunks` chunks, `[B, H, chunks]`; length 0: none."""
    places = lay_out(_of(tree.offsets, slots, ranked).long(), sizes, chunks)
    absent = places < 0
    numbers = _of(tree.members, slots, places.clamp(min=0)).long().masked_fill(absent, 0)
    row = slots[:, None, None]
    starts = tree.edges[row, numbers].long()
    return numbers, starts, (tree.edges[row, numbers + 1] - starts).masked_fill(absent, 0)


def _of(table: Tensor, slots: Tensor, places: Tensor) -> Tensor:
    """What a `[R, H, n]` table has at `places` `[B, H, m]` of each row's slot; no slot is copied."""
    heads = torch.arange(table.shape[1], device=table.device)
    return table[slots[:, None, None], heads[:, None], places]


def _products(query: Tensor, vectors: Tensor) -> Tensor:
    """Inner products `[B, H, n]` of `[B, H, d]` and `[B, H, n, d]`; a product with a column would be 5 times slower."""
    return (query[:, :, None] @ vectors.transpose(-1, -2))[:, :, 0]


def fill_budget(
    numbers: Tensor,
    starts: Tensor,
    lengths: Tensor,
    seq_lens: Tensor,
    *,
    head: Tensor,
    tail: Tensor,
    budget: int,
    width: int,
) -> Selection:
    """The first `head` tokens, whole chunks until the next one does not fit, and everything from `tail` on.

    Args:
        numbers, starts, lengths: int64 `[B, G, C]`, chunks from the best down: which one, where it starts, how many
            tokens it has; 0 tokens: no chunk, behind all that are. Chunks of higher number lie behind those of lower.
        seq_lens, head, tail: int32 `[B]`.
        budget: tokens of a set; what lies before `head` and behind `tail` is in it all the same.
        width: how many tokens the ids have room for.

    Returns:
        Tokens int32 `[B, G, width]`, ascending, -1 behind the last, and their counts.
    """
    fits = (lengths > 0) & (lengths.cumsum(-1) <= (budget - head - (seq_lens - tail))[:, None, None])
    order = numbers.masked_fill(~fits, torch.iinfo(torch.int64).max).sort(dim=-1).indices
    lengths = (lengths * fits).gather(-1, order)
    shape = (*lengths.shape[:2], 1)
    before, last, behind = (value[:, None, None].expand(shape).long() for value in (head, tail, seq_lens - tail))
    first = torch.cat((torch.zeros_like(before), starts.gather(-1, order), last), dim=-1)
    size = torch.cat((before, lengths, behind), dim=-1)
    return Selection(lay_out(first, size, width).clamp(min=-1).int(), size.sum(-1).int())


def lay_out(first: Tensor, sizes: Tensor, width: int) -> Tensor:
    """`first[i], first[i] + 1, ...` (`sizes[i]` of them) for every i in turn, int64 `[..., width]`.

    What does not fit is cut off; places behind the last are negative. `first` and `sizes` are int64 `[..., n]`.
    """
    bounds = pad(sizes.cumsum(-1).clamp(max=width), (1, 0))
    # A place's number plus its list's shift is the integer there. The last list fills up with negative ones.
    shifts = pad(first - bounds[..., :-1], (0, 1), value=-width)
    sizes = pad(bounds, (0, 1), value=width).diff(dim=-1)
    outer = sizes.shape[:-1].numel()
    flat = torch.repeat_interleave(shifts.flatten(), sizes.flatten(), output_size=outer * width)
    return flat.view(*sizes.shape[:-1], width) + torch.arange(width, device=first.device)
