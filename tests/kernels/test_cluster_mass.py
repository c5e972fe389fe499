"""Scores by attention mass in every implementation, as loops in float64 have them; and what is refused."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from kernel_checks import Run, every_index_run, refused

from saccade.kernels._dispatch import Implementation
from saccade.kernels._mass_tree import MassSettings, MassTree
from saccade.kernels.cluster_mass.api import cluster_mass

HEADS, GROUP, DIM, TOKENS, SETS, GROUPS = 2, 3, 16, 32, 8, 5
SINKS, SCALE = 5, 0.4
ENDS = (150, 0, 96)
"""Of three slots, one of which is empty; four tokens to a set."""
ROWS = torch.tensor([2, 0, 1, 0], dtype=torch.int32)
LENGTHS = torch.tensor([120, 170, 40, 151], dtype=torch.int32)


def some_tree(seed: int = 0, dtype: torch.dtype = torch.float32, *, grouped: bool = True) -> MassTree:
    """Labels of sets that there are, in groups or of the whole row; what is in no set is NaN, as memory may be."""
    draw = torch.Generator().manual_seed(seed)
    shape = len(ENDS), HEADS, GROUPS * SETS
    means, spreads = torch.randn(*shape, DIM, generator=draw), torch.rand(*shape, generator=draw)
    sizes = torch.randint(1, 9, shape, generator=draw, dtype=torch.int32)
    sizes[:, :, 3] = 0
    used = [-(-end // 4) for end in ENDS]
    for slot, count in enumerate(used):
        sizes[slot, :, count:] = 0
    for values in (means, spreads):
        values[sizes == 0] = math.nan
    place = torch.arange(GROUPS * TOKENS).div(TOKENS, rounding_mode="floor") * SETS
    numbers = torch.arange(GROUPS * TOKENS) % TOKENS // 4
    numbers = torch.where(numbers == 3, 4, numbers)
    labels = torch.stack([numbers, torch.where(numbers < 2, 1 - numbers, numbers)]).expand(*shape[:2], -1)
    if not grouped:
        labels = (labels + place)[:, :1].expand(-1, HEADS, -1)
    labels = labels.to(torch.int16 if grouped else torch.int32)
    told = (torch.tensor(numbers, dtype=torch.int32) for numbers in (ENDS, used))
    return MassTree(means.to(dtype), spreads, sizes, labels, *told, TOKENS, SETS if grouped else 0)


def queries(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(9)).to(dtype)


def settings(**changes: Any) -> MassSettings:
    return MassSettings(**{"width": 171, "sinks": SINKS, "scale": SCALE, "spread": 1.5, **changes})


def slow(q: torch.Tensor, tree: MassTree, how: MassSettings) -> np.ndarray:
    """One query head, set and token at a time; NaN behind the row."""
    found = np.full((4, HEADS, GROUP, how.width), np.nan)
    for row, slot in enumerate(ROWS.tolist()):
        end = ENDS[slot]
        for head, member in np.ndindex(HEADS, GROUP):
            query = q[row, head * GROUP + member].double().numpy()
            weights = {}
            for place, size in enumerate(tree.sizes[slot, head].tolist()):
                if size:
                    near = float(query @ tree.means[slot, head, place].double().numpy())
                    far = float(tree.spreads[slot, head, place]) * math.sqrt(float(query @ query) / DIM)
                    weights[place] = size * math.exp(how.scale * (near + how.spread * far))
            for position in range(int(LENGTHS[row])):
                if position < SINKS or position >= end:
                    found[row, head, member, position] = math.inf
                else:
                    place = int(tree.labels[slot, head, position]) + position // TOKENS * tree.sets
                    found[row, head, member, position] = weights[place] / sum(weights.values())
    return found.reshape(4, HEADS * GROUP, -1) if how.each else found.sum(2)


def expect_mass(q: torch.Tensor, tree: MassTree, how: MassSettings, implementation: Implementation) -> None:
    """Within what float32 loses: |l| is below 40, so exp makes 40 relative errors of each of a product's roundings."""
    scores = cluster_mass(q, tree, ROWS, LENGTHS, how, implementation=implementation)
    expected = slow(q, tree, how)
    for row, length in enumerate(LENGTHS.tolist()):
        got, wanted = scores[row, :, :length].double().numpy(), expected[row, :, :length]
        assert np.array_equal(np.isinf(got), np.isinf(wanted))
        finite = np.isfinite(wanted)
        assert finite.any() == (int(ROWS[row]) != 1)
        np.testing.assert_allclose(got[finite], wanted[finite], rtol=40 * 2.0**-23 * DIM, atol=0)


@every_index_run
def test_against_loops(run: Run) -> None:
    odd = {"triton": torch.float16}.get(run.implementation, torch.bfloat16)
    for dtype, grouped, each in product((torch.float32, odd), (True, False), (True, False)):
        with run.chosen() as implementation:
            tree = some_tree(dtype=dtype, grouped=grouped)
            expect_mass(queries(dtype), tree, settings(each=each), implementation)


def test_some_heads_of_a_tree_and_more_tokens_than_a_thread_takes() -> None:
    q, tree = queries(), some_tree(1)
    whole = cluster_mass(q, tree, ROWS, LENGTHS, settings())
    part = cluster_mass(q[:, GROUP:], tree.heads(1, 2), ROWS, LENGTHS, settings())
    for row, length in enumerate(LENGTHS.tolist()):
        assert torch.equal(part[row, :, :length], whole[row, 1:, :length])
    tree, times = some_tree(grouped=False), 110
    tree = replace(tree, labels=tree.labels.repeat(1, 1, times), ends=tree.ends * times)
    long = LENGTHS * times, settings(width=171 * times)
    found, expected = (cluster_mass(q, tree, ROWS, *long, implementation=one) for one in ("native", "reference"))
    for row, length in enumerate(long[0].tolist()):
        torch.testing.assert_close(found[row, :, :length], expected[row, :, :length], rtol=40 * 2.0**-23 * DIM, atol=0)


def test_refusals() -> None:
    q, tree, how = queries(), some_tree(), settings()
    words = r"q must be \[4, a multiple of 2, 16\] and seq_lens \[4\], got \[4, 6, 8\]"
    refused(words, cluster_mass, q[..., :8], tree, ROWS, LENGTHS, how)
    refused(r"slots must be 0 to 2, got \[3, 1, 2, 1\]", cluster_mass, q, tree, ROWS + 1, LENGTHS, how)
    half = replace(tree, means=tree.means.half())
    words = r"implementation 'native' cannot take this call: .*float16"
    refused(words, cluster_mass, q, half, ROWS, LENGTHS, how, implementation="native")
    refused("unknown implementation 'cpu'", cluster_mass, q, tree, ROWS, LENGTHS, how, implementation="cpu")
