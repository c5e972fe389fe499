"""Scores by attention mass: every implementation against loops in float64, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels._mass_tree import ChunkMeans, MassSettings, MassTree
from saccade.kernels.cluster_mass.api import cluster_mass

HEADS, GROUP, DIM, ITEMS, CLUSTERS, GROUPS = 2, 3, 16, 32, 8, 5
SINKS, SCALE, REACH = 5, 0.4, 60
ENDS = (150, 0, 96)
"""Of three slots, one of which is empty; four tokens or chunks to a cluster."""
ROWS = torch.tensor([2, 0, 1, 0], dtype=torch.int32)
LENGTHS = torch.tensor([120, 170, 40, 151], dtype=torch.int32)


def some_tree(seed: int = 0, dtype: torch.dtype = torch.float32, *, chunks: bool = False) -> MassTree:
    """Labels of clusters that there are; what is in no cluster is NaN, as memory may be."""
    draw = torch.Generator().manual_seed(seed)
    slots, places, room = len(ENDS), GROUPS * CLUSTERS, GROUPS * ITEMS

    def floats(*sizes: int) -> torch.Tensor:
        return torch.randn(slots, HEADS, *sizes, generator=draw)

    sizes = torch.randint(1, 9, (slots, HEADS, places), generator=draw, dtype=torch.int32)
    labels = torch.randint(0, CLUSTERS, (slots, HEADS, room), generator=draw, dtype=torch.int16)
    means, spreads = floats(places, DIM), floats(places).abs()
    counts = [end // 3 if chunks else end for end in ENDS]
    for slot, count in enumerate(counts):
        full, rest = divmod(count, ITEMS)
        used = full * CLUSTERS + -(-rest // 4)
        sizes[slot, :, used:] = 0
        for values in (means, spreads):
            values[slot, :, used:] = math.nan
        labels[slot, :, full * ITEMS : count] %= max(-(-rest // 4), 1)
        labels[slot, :, count:] = 32767
    held = None
    if chunks:
        widths = torch.randint(1, 6, (slots, room), generator=draw)
        edges = torch.nn.functional.pad(widths.cumsum(1), (1, 0)).int() + SINKS
        owners = torch.stack([torch.bucketize(torch.arange(200), row[1:], right=True) for row in edges]).int()
        chunk_means, chunk_spreads = floats(room, DIM).to(dtype), floats(room).abs()
        held = ChunkMeans(chunk_means, chunk_spreads, edges, owners, torch.tensor(counts, dtype=torch.int32))
        ends = [int(row[count]) if count else 0 for row, count in zip(edges, counts, strict=True)]
    else:
        ends = [*ENDS]
    return MassTree(
        means.to(dtype), spreads, sizes, labels, torch.tensor(ends, dtype=torch.int32), ITEMS, CLUSTERS, held
    )


def queries(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(9)).to(dtype)


def settings(**changes: Any) -> MassSettings:
    return MassSettings(**{"width": 171, "sinks": SINKS, "scale": SCALE, "spread": 1.5, "reach": REACH, **changes})


def slow(q: torch.Tensor, tree: MassTree, how: MassSettings) -> np.ndarray:
    """One query head, cluster and token at a time; infinite where it is so by rule, NaN behind the row."""
    found = np.full((4, HEADS, GROUP, how.width), np.nan)
    for row, slot in enumerate(ROWS.tolist()):
        end, count = int(tree.ends[slot]), int((tree.ends if tree.chunks is None else tree.chunks.counts)[slot])
        for head in range(HEADS):
            labels = tree.labels[slot, head].tolist()
            cluster_of = [place // ITEMS * CLUSTERS + labels[place] for place in range(count)]
            sizes = tree.sizes[slot, head].tolist()
            present = [place for place, size in enumerate(sizes) if size]
            asked = q[row].double().numpy()[head * GROUP : (head + 1) * GROUP]

            def logit(query: np.ndarray, mean: Any, far: Any, size: int, more: float) -> float:
                norm = math.sqrt(float((query**2).sum()) / DIM)
                near = float(query @ mean.double().numpy())
                return how.scale * (near + more * norm * float(far)) + math.log(size)

            logits = {
                place: [
                    logit(
                        query, tree.means[slot, head, place], tree.spreads[slot, head, place], sizes[place], how.spread
                    )
                    for query in asked
                ]
                for place in present
            }
            totals = [math.log(sum(math.exp(one[member]) for one in logits.values()) or 1) for member in range(GROUP)]
            shares = {
                place: [math.exp(one - t) for one, t in zip(each, totals, strict=True)]
                for place, each in logits.items()
            }
            for position in range(int(LENGTHS[row])):
                if position < SINKS or position >= end:
                    found[row, head, :, position] = math.inf
                elif tree.chunks is None:
                    found[row, head, :, position] = shares[cluster_of[position]]
                else:
                    chunk, held = int(tree.chunks.owners[slot, position]), tree.chunks
                    size = int(held.edges[slot, chunk + 1] - held.edges[slot, chunk])
                    for member in range(GROUP):
                        ranks = (
                            [sum(each) for each in shares.values()]
                            if not how.each
                            else [each[member] for each in shares.values()]
                        )
                        order = sorted(range(len(present)), key=lambda at: (-ranks[at], at))
                        kept, reached = set(), 0
                        for at in order:
                            if reached < REACH:
                                kept.add(present[at])
                                reached += sizes[present[at]]
                        one = logit(
                            asked[member],
                            held.means[slot, head, chunk],
                            held.spreads[slot, head, chunk],
                            size,
                            how.spread + 1,
                        )
                        value = math.exp(one - totals[member]) if cluster_of[chunk] in kept else -math.inf
                        found[row, head, member, position] = value
    return found.reshape(4, HEADS * GROUP, -1) if how.each else found.sum(2)


def expect_mass(q: torch.Tensor, tree: MassTree, how: MassSettings, implementation: Implementation) -> None:
    """Within what float32 sums of products of this size may lose: |l| is below 40, so exp loses 40 roundings of it."""
    scores = cluster_mass(q, tree, ROWS, LENGTHS, how, implementation=implementation)
    expected = slow(q, tree, how)
    for row, length in enumerate(LENGTHS.tolist()):
        got, wanted = scores[row, :, :length].double().numpy(), expected[row, :, :length]
        assert np.array_equal(np.isinf(got), np.isinf(wanted))
        finite = np.isfinite(wanted)
        assert finite.any() == (int(ROWS[row]) != 1)
        np.testing.assert_allclose(got[finite], wanted[finite], rtol=40 * 2.0**-23 * DIM, atol=0)


@pytest.mark.parametrize("each", [False, True], ids=["kv", "query"])
@pytest.mark.parametrize("chunks", [False, True], ids=["tokens", "chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("implementation", ["reference", "native"])
def test_against_loops(implementation: Implementation, dtype: torch.dtype, chunks: bool, each: bool) -> None:
    expect_mass(queries(dtype), some_tree(dtype=dtype, chunks=chunks), settings(each=each), implementation)


def test_some_heads_of_a_tree() -> None:
    q, tree = queries(), some_tree(1, chunks=True)
    whole = cluster_mass(q, tree, ROWS, LENGTHS, settings())
    part = cluster_mass(q[:, GROUP:], tree.heads(1, 2), ROWS, LENGTHS, settings())
    for row, length in enumerate(LENGTHS.tolist()):
        assert torch.equal(part[row, :, :length], whole[row, 1:, :length])


def test_refusals() -> None:
    q, tree, how = queries(), some_tree(), settings()
    with pytest.raises(KernelError, match=r"q must be \[4, a multiple of 2, 16\] and seq_lens \[4\], got \[4, 6, 8\]"):
        cluster_mass(q[..., :8], tree, ROWS, LENGTHS, how)
    with pytest.raises(KernelError, match=r"slots must be 0 to 2, got \[3, 1, 2, 1\]"):
        cluster_mass(q, tree, ROWS + 1, LENGTHS, how)
    with pytest.raises(KernelError, match=r"implementation 'native' cannot take this call: .*float16"):
        cluster_mass(q, replace(tree, means=tree.means.half()), ROWS, LENGTHS, how, implementation="native")
    with pytest.raises(KernelError, match="unknown implementation 'cpu'"):
        cluster_mass(q, tree, ROWS, LENGTHS, how, implementation="cpu")
