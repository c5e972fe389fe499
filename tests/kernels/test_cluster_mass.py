"""Scores by attention mass on CPUs: parts of a tree, long rows, and what is refused."""

from dataclasses import replace

import torch
from cluster_mass_contract import (
    DIM,
    GROUP,
    LENGTHS,
    ROWS,
    queries,
    settings,
    some_tree,
    test_against_loops,  # noqa: F401 - of these implementations
)
from kernel_checks import refused

from saccade.kernels.cluster_mass.api import cluster_mass


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
