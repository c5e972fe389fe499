"""One query head's scores for its group: which head is drawn, and that nothing but seed and length decides it."""

from __future__ import annotations

import pytest
import torch

from saccade.kernels.dense_decode_scores.api import decode_scores
from saccade.selection.scorers.random_head import RandomHeadScorer
from saccade.types import KVView, Rows

HEADS, KV_HEADS, DIM, LONGEST = 6, 2, 8, 40


def view(*lengths: int, kv_heads: int = KV_HEADS) -> KVView:
    keys = torch.randn(len(lengths), LONGEST, kv_heads, DIM, generator=torch.Generator().manual_seed(1))
    table = torch.arange(len(lengths), dtype=torch.int32)[:, None]
    return KVView(keys, keys, Rows.on_host(table, [0] * len(lengths), lengths))


def test_every_head_is_drawn_as_often_and_seeds_differ() -> None:
    lengths = torch.arange(1, 3001, dtype=torch.int32)
    drawn = [RandomHeadScorer(seed=seed)._drawn(lengths, 3) for seed in (0, 1, 2**40)]
    for one in drawn:
        counts = one.bincount(minlength=3)
        # Six standard deviations of 3,000 draws.
        assert len(counts) == 3 and (counts - 1000).abs().max() < 6 * (3000 * 2 / 9) ** 0.5
    agreeing = (drawn[0] == drawn[1]).float().mean()
    assert abs(agreeing - 1 / 3) < 6 * (2 / 9 / 3000) ** 0.5


@pytest.mark.parametrize("heads", ["kv", "all"])
def test_scores_are_those_of_one_head(heads: str) -> None:
    q = torch.randn(3, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    kv, scorer = view(40, 17, 23), RandomHeadScorer(heads=heads, seed=5)  # type: ignore[arg-type]  # of a parameter
    each = decode_scores(q, kv, pooling="each")
    found = scorer.score(q, kv, None)
    assert torch.equal(found, scorer.score(q, kv, None, each))
    group = HEADS // found.shape[1]
    for row, length in enumerate((40, 17, 23)):
        drawn = int(scorer._drawn(torch.tensor([length]), group))
        for number in range(found.shape[1]):
            assert torch.equal(found[row, number, :length], each[row, number * group + drawn, :length])


def test_some_of_the_heads_hear_the_same_head() -> None:
    """A runtime may ask for a group alone."""
    q, kv = torch.randn(1, HEADS, DIM), view(33)
    scorer, half = RandomHeadScorer(), HEADS // 2
    whole = scorer.score(q, kv, None)
    alone = KVView(kv.k[:, :, 1:], kv.v[:, :, 1:], kv.rows)
    assert torch.equal(scorer.score(q[:, half:], alone, None)[:, 0], whole[:, 1])
