"""Exact top-k, ties and infinities included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import implementations
from torch import Tensor

import oracles
from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels.topk import Order, topk

STYLES = ("distinct", "clustered", "constant", "masked", "forced", "zeros")


def make_scores(style: str, batch: int, groups: int, width: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(batch, groups, width, generator=random)
    coin = torch.rand(scores.shape, generator=random)
    if style == "clustered":
        return scores.round()
    if style == "constant":
        return torch.full_like(scores, -2.5)
    if style == "masked":
        return scores.masked_fill(coin < 0.7, -math.inf)
    if style == "forced":
        return scores.masked_fill(coin < 0.2, math.inf).masked_fill(coin > 0.6, -math.inf)
    if style == "zeros":
        return torch.where(coin < 0.5, -0.0, 0.0)
    return scores


def expect_topk(scores: Tensor, lengths: list[int], k: int, order: Order, implementation: Implementation) -> None:
    ids, counts = topk(scores, torch.tensor(lengths, dtype=torch.int32), k, order=order, implementation=implementation)
    width = min(k, scores.shape[2])
    assert ids.dtype == counts.dtype == torch.int32
    assert ids.shape == (*scores.shape[:2], width)
    assert counts.tolist() == [[min(k, length)] * scores.shape[1] for length in lengths]
    for row, length in enumerate(lengths):
        for group in range(scores.shape[1]):
            wanted = oracles.topk(scores[row, group].tolist(), length, k)
            if order == "position":
                wanted.sort()
            assert ids[row, group].tolist() == wanted + [-1] * (width - len(wanted))


@given(
    st.sampled_from(STYLES),
    st.lists(st.floats(0, 1), min_size=1, max_size=3),
    st.integers(1, 3),
    st.one_of(st.integers(1, 40), st.integers(100, 400)),
    st.one_of(st.integers(1, 9), st.integers(1, 450)),
    st.sampled_from(("position", "score")),
    implementations,
    st.integers(0, 2**31),
)
def test_topk_matches_the_oracle(
    style: str,
    shares: list[float],
    groups: int,
    width: int,
    k: int,
    order: Order,
    implementation: Implementation,
    seed: int,
) -> None:
    scores = make_scores(style, len(shares), groups, width, seed)
    lengths = [round(share * width) for share in shares]
    for row, length in enumerate(lengths):
        scores[row, :, length:] = math.inf  # better than everything, and not to be chosen
    expect_topk(scores, lengths, k, order, implementation)


@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30),
    st.integers(1, 30),
    st.sampled_from(("position", "score")),
    implementations,
)
def test_any_floats(values: list[float], k: int, order: Order, implementation: Implementation) -> None:
    expect_topk(torch.tensor([[values]]), [len(values)], k, order, implementation)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
@pytest.mark.parametrize("style", STYLES)
def test_every_k(style: str, implementation: Implementation) -> None:
    """Among few distinct scores the cut falls between equals for almost every k."""
    scores = make_scores(style, 1, 2, 64, 7)
    for k in range(1, 66):
        expect_topk(scores, [64], k, "position", implementation)
        expect_topk(scores, [61], k, "score", implementation)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_a_tie_outside_the_best_blocks(implementation: Implementation) -> None:
    """Every block of a narrowed row may reach the cut; the lowest positions win wherever they lie."""
    scores = torch.zeros(1, 1, 400)
    scores[..., 200:] = 1.0
    scores[..., 390:] = 2.0
    for k in range(1, 40):
        expect_topk(scores, [400], k, "position", implementation)
        expect_topk(scores.flip(-1).contiguous(), [399], k, "position", implementation)


@pytest.mark.parametrize("style", STYLES)
def test_long_rows_with_ties_far_apart(style: str) -> None:
    """Wide enough that the CPU path narrows the row to blocks; equal scores lie in blocks it leaves out."""
    expect_topk(make_scores(style, 2, 2, 10_007, 3), [10_007, 9_000], 256, "position", "cpu")


def test_arguments_that_do_not_fit_are_named() -> None:
    scores, lengths = torch.zeros(2, 1, 5), torch.tensor([5, 5], dtype=torch.int32)
    with pytest.raises(KernelError, match="float32"):
        topk(scores.double(), lengths, 2)
    with pytest.raises(KernelError, match="int32"):
        topk(scores, lengths.long(), 2)
    with pytest.raises(KernelError, match="lengths"):
        topk(scores, lengths[:1], 2)
    with pytest.raises(KernelError, match="k must"):
        topk(scores, lengths, 0)
    with pytest.raises(KernelError, match="order"):
        topk(scores, lengths, 2, order="best")  # type: ignore[arg-type]
