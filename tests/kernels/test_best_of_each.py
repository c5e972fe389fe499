"""The best of every row as a mask, against sorting each row by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracles
from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels.best_of_each.api import WIDEST, best_of_each


def expect_best(scores: Tensor, counts: list[int], implementation: Implementation) -> None:
    chosen = best_of_each(scores, torch.tensor(counts, dtype=torch.int32), implementation=implementation)
    assert chosen.dtype == torch.bool and chosen.shape == scores.shape
    for head in range(scores.shape[0]):
        for row, count in enumerate(counts):
            wanted = oracles.topk(scores[head, row].tolist(), scores.shape[2], count)
            assert chosen[head, row].nonzero()[:, 0].tolist() == sorted(wanted)


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 60), st.booleans(), st.integers(0, 2**31))
def test_the_reference_against_the_oracle(heads: int, rows: int, width: int, tied: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(heads, rows, width, generator=draw)
    coin = torch.rand(heads, rows, width, generator=draw)
    scores = scores.masked_fill(coin < 0.1, float("inf")).masked_fill(coin > 0.8, float("-inf"))
    counts = torch.randint(1, width + 1, (rows,), generator=draw).tolist()
    expect_best(scores.round() if tied else scores, counts, "reference")


def test_what_does_not_fit_is_refused() -> None:
    scores, counts = torch.zeros(2, 3, 8), torch.ones(3, dtype=torch.int32)
    with pytest.raises(KernelError, match="do not fit"):
        best_of_each(scores, counts[:2])
    with pytest.raises(KernelError, match="do not fit"):
        best_of_each(scores.double(), counts)
    with pytest.raises(KernelError, match="int32"):
        best_of_each(scores, counts.long())
    with pytest.raises(KernelError, match=f"not on a CUDA device|longer than {WIDEST}"):
        best_of_each(torch.zeros(1, 3, WIDEST + 1), counts, implementation="triton")
