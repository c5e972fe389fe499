"""LessIsMore's union against a loop over ranks and heads."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import every_index
from kernel_checks import fast_index as fast
from kernel_checks import index_implementations as implementations
from torch import Tensor

import oracles
from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels.rank_union.api import rank_union


def rankings(batch: int, heads: int, universe: int, seed: int, *, agreeing: bool) -> list[list[list[int]]]:
    """Choices of each row's heads, best first; the heads of a row may all have the same."""
    pick, ranked = random.Random(seed), []
    for _ in range(batch):
        shared = pick.sample(range(universe), pick.randint(1, universe))
        own = [pick.sample(range(universe), pick.randint(0, universe)) for _ in range(heads)]
        ranked.append([shared] * heads if agreeing else own)
    return ranked


def lists_of(ranked: list[list[list[int]]], width: int) -> tuple[Tensor, Tensor]:
    """As the kernels take them: ids `[B, H, width]` and how many of them each list has."""
    ids = [[choices + [-1] * (width - len(choices)) for choices in row] for row in ranked]
    counts = [[len(choices) for choices in row] for row in ranked]
    return torch.tensor(ids, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)


def ranked_of(ids: Tensor, counts: Tensor) -> list[list[list[int]]]:
    """What `lists_of` was given."""
    both = zip(ids.tolist(), counts.tolist(), strict=True)
    return [[own[:count] for own, count in zip(*row, strict=True)] for row in both]


def expect_union(
    ranked: list[list[list[int]]], width: int, universe: int, limit: int, implementation: Implementation
) -> None:
    merged, found = rank_union(*lists_of(ranked, width), limit, universe=universe, implementation=implementation)
    expect_merged(merged, found, ranked, limit)


def expect_merged(merged: Tensor, found: Tensor, ranked: list[list[list[int]]], limit: int) -> None:
    assert merged.dtype == found.dtype == torch.int32
    assert merged.shape == (len(ranked), 1, limit)
    assert found.shape == (len(ranked), 1)
    for row, choices in enumerate(ranked):
        wanted = sorted(oracles.rank_union(choices, limit))
        assert found[row].tolist() == [len(wanted)]
        assert merged[row, 0].tolist() == wanted + [-1] * (limit - len(wanted))


@given(
    st.integers(1, 3),
    st.integers(1, 8),
    st.integers(1, 30),
    st.integers(1, 50),
    st.integers(0, 3),
    st.booleans(),
    implementations,
    st.integers(0, 2**31),
)
def test_rank_union_matches_the_oracle(
    batch: int,
    heads: int,
    universe: int,
    limit: int,
    slack: int,
    agreeing: bool,
    implementation: Implementation,
    seed: int,
) -> None:
    ranked = rankings(batch, heads, universe, seed, agreeing=agreeing)
    width = max(len(choices) for row in ranked for choices in row) + slack or 1
    expect_union(ranked, width, universe, limit, implementation)


@pytest.mark.parametrize("implementation", every_index)
def test_heads_take_turns(implementation: Implementation) -> None:
    """The worked example: second choices come after every head's first choice, lower head first."""
    ids = torch.tensor([[[5, 1, 7], [5, 3, 1], [2, 9, 0]]], dtype=torch.int32)
    merged, _ = rank_union(ids, torch.full((1, 3), 3, dtype=torch.int32), 4, universe=10, implementation=implementation)
    assert merged.tolist() == [[[1, 2, 3, 5]]]


@pytest.mark.parametrize("implementation", every_index)
@pytest.mark.parametrize("limit", [1, 700, 4000])
def test_many_heads_of_a_wide_universe(limit: int, implementation: Implementation) -> None:
    """Positions up to the last of 10,000, in rows that are parts of wider ones."""
    random_order = torch.rand(2, 9, 10_000, generator=torch.Generator().manual_seed(3)).argsort(dim=-1).int()
    ids = random_order[:, ::2, :900]
    counts = torch.tensor([[900, 0, 17, 899, 900], [1, 1, 0, 0, 500]], dtype=torch.int32)
    merged, found = rank_union(ids, counts, limit, universe=10_000, implementation=implementation)
    expect_merged(merged, found, ranked_of(ids, counts), limit)


@pytest.mark.parametrize("wrong", [-1, 5, 2**31 - 1, -(2**31)] if "native" in fast else [])
def test_ids_outside_the_universe_are_refused(wrong: int) -> None:
    ids = torch.tensor([[[4, 1], [wrong, 3]]], dtype=torch.int32)
    with pytest.raises(KernelError, match="universe"):
        rank_union(ids, torch.full((1, 2), 2, dtype=torch.int32), 4, universe=5, implementation="native")


def test_arguments_that_do_not_fit_are_named() -> None:
    ids, counts = torch.zeros(1, 2, 3, dtype=torch.int32), torch.ones(1, 2, dtype=torch.int32)
    with pytest.raises(KernelError, match="fit"):
        rank_union(ids, counts[0], 2, universe=9)
    with pytest.raises(KernelError, match="int32"):
        rank_union(ids.long(), counts, 2, universe=9)
    with pytest.raises(KernelError, match="limit"):
        rank_union(ids, counts, 0, universe=9)
