"""LessIsMore's union in every implementation: what a loop over ranks and heads gives, and what does not fit."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_caches import int32
from kernel_checks import (
    INTERPRETED,
    every_implementation,
    fewer,
    index_implementations,
    needs_the_library,
    refused,
    seeds,
)
from torch import Tensor

import oracles
from saccade.kernels._dispatch import Implementation
from saccade.kernels.rank_union.api import framed_rank_union

Ranked = list[list[list[int]]]
"""Choices of each row's heads, best first."""


def rank_union(
    ids: Tensor, counts: Tensor, limit: int, *, universe: int, implementation: Implementation = "auto"
) -> tuple[Tensor, Tensor]:
    """The union alone, of rows so long that they do not fit."""
    lengths = torch.full(ids.shape[:1], 2**30, dtype=torch.int32, device=ids.device)
    how: Any = {"sinks": 0, "window": 0, "universe": universe, "implementation": implementation}
    return framed_rank_union(ids, counts, lengths, limit, **how)


def rankings(batch: int, heads: int, universe: int, seed: int, *, agreeing: bool) -> Ranked:
    """Random ones; the heads of a row may all have the same."""
    pick, ranked = random.Random(seed), []
    for _ in range(batch):
        shared = pick.sample(range(universe), pick.randint(1, universe))
        own = [pick.sample(range(universe), pick.randint(0, universe)) for _ in range(heads)]
        ranked.append([shared] * heads if agreeing else own)
    return ranked


def lists_of(ranked: Ranked, width: int) -> tuple[Tensor, Tensor]:
    """As the kernels take them: ids `[B, H, width]` and how many of them each list has."""
    ids = [[choices + [-1] * (width - len(choices)) for choices in row] for row in ranked]
    counts = [[len(choices) for choices in row] for row in ranked]
    return int32(ids), int32(counts)


def ranked_of(ids: Tensor, counts: Tensor) -> Ranked:
    """What `lists_of` was given."""
    both = zip(ids.tolist(), counts.tolist(), strict=True)
    return [[own[:count] for own, count in zip(*row, strict=True)] for row in both]


def expect_union(ranked: Ranked, width: int, universe: int, limit: int, implementation: Implementation) -> None:
    merged, found = rank_union(*lists_of(ranked, width), limit, universe=universe, implementation=implementation)
    expect_merged(merged, found, ranked, limit)


def expect_merged(merged: Tensor, found: Tensor, ranked: Ranked, limit: int) -> None:
    assert merged.dtype == found.dtype == torch.int32
    assert merged.shape == (len(ranked), 1, limit)
    assert found.shape == (len(ranked), 1)
    for row, choices in enumerate(ranked):
        wanted = sorted(oracles.rank_union(choices, limit))
        assert found[row].tolist() == [len(wanted)]
        assert merged[row, 0].tolist() == wanted + [-1] * (limit - len(wanted))


def expect_framed(
    ranked: Ranked, lengths: list[int], frame: tuple[int, int, int], merged: Tensor, found: Tensor
) -> None:
    """All of a row that fits, whatever its lists say; else its sinks, its window and the lists' union between them.

    `frame` is sinks, limit and window.
    """
    sinks, limit, window = frame
    for row, length in enumerate(lengths):
        union = [sinks + position for position in oracles.rank_union(ranked[row], limit)]
        fits = length <= sum(frame)
        wanted = range(length) if fits else {*range(sinks), *union, *range(length - window, length)}
        assert found[row].tolist() == [len(wanted)]
        assert merged[row, 0].tolist() == sorted(wanted) + [-1] * (sum(frame) - len(wanted))


sizes = st.tuples(st.integers(1, 9), st.integers(1, 90 if INTERPRETED else 30), st.integers(0, 3))
ends = st.sampled_from(((0, 0), (3, 6), (2, 0)))
"""Sinks and a window."""


@fewer(30)
@given(sizes, st.integers(1, 120), ends, st.booleans(), index_implementations, seeds)
def test_rank_union_matches_the_oracle(
    sizes: tuple[int, int, int],
    limit: int,
    ends: tuple[int, int],
    agreeing: bool,
    implementation: Implementation,
    seed: int,
) -> None:
    """Long rows; and one that fits between what it fits in, and one shorter than its sinks."""
    (heads, universe, slack), (sinks, window) = sizes, ends
    ranked = rankings(4, heads, universe, seed, agreeing=agreeing)
    width = max(len(choices) for row in ranked for choices in row) + slack or 1
    lengths = [2**30, max(universe, limit) + sinks + window + 1, sinks + limit + window, sinks // 2]
    how: Any = {"sinks": sinks, "window": window, "universe": universe, "implementation": implementation}
    merged, found = framed_rank_union(*lists_of(ranked, width), int32(lengths), limit, **how)
    assert merged.dtype == found.dtype == torch.int32
    expect_framed(ranked, lengths, (sinks, limit, window), merged, found)


@every_implementation
@fewer(15)
@given(st.integers(1, 9), st.integers(2, 90), st.integers(1, 60), st.integers(1, 40), seeds)
def test_whole_lists_are_asked_for_where_their_beginnings_fall_short(
    implementation: Implementation, heads: int, universe: int, limit: int, first: int, seed: int
) -> None:
    """Rows of heads that agree, of heads that do not, and without any list; memory that nothing was written to is odd.

    A row ends anywhere behind the tokens that its lists name, in a universe that may be wider.
    """
    pick = random.Random(seed)
    shared = pick.sample(range(universe), pick.randint(1, universe))
    own = [pick.sample(range(universe), universe) for _ in range(heads)]
    ranked, sinks, window = [[shared] * heads, own, [[]] * heads], 2, 3
    lengths = [max(universe + sinks + window, limit + sinks + window + 1) + pick.randint(0, 9) for _ in range(2)] + [5]

    def lists(rows: list[int], width: int) -> tuple[Tensor, Tensor]:
        """The beginnings of some rows' lists; those of the others are empty."""
        held = [[one[:width] if row in rows else [] for one in choices] for row, choices in enumerate(ranked)]
        return lists_of(held, width)

    asked: list[list[int]] = []

    def rest(short: Tensor) -> tuple[Tensor, Tensor]:
        assert all(length in (0, lengths[row]) for row, length in enumerate(short.tolist()))
        asked.append([row for row, length in enumerate(short.tolist()) if length])
        return lists(asked[-1], universe)

    empty, new_empty = torch.empty, torch.Tensor.new_empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *sizes, **others: empty(*sizes, **others).fill_(77))
        patch.setattr(
            torch.Tensor, "new_empty", lambda own, *sizes, **others: new_empty(own, *sizes, **others).fill_(77)
        )
        merged, found = framed_rank_union(
            *lists([0, 1, 2], first),
            int32(lengths),
            limit,
            sinks=sinks,
            window=window,
            universe=universe + pick.choice([0, 40]),
            rest=rest,
            implementation=implementation,
        )
    short = [row for row in range(2) if len(oracles.rank_union([one[:first] for one in ranked[row]], limit)) < limit]
    assert asked == ([short] if short or implementation == "triton" else [])
    expect_framed(ranked, lengths, (sinks, limit, window), merged, found)


@every_implementation
def test_heads_take_turns(implementation: Implementation) -> None:
    """The worked example: second choices come after every head's first choice, lower head first."""
    ids = int32([[[5, 1, 7], [5, 3, 1], [2, 9, 0]]])
    merged, _ = rank_union(ids, int32([[3, 3, 3]]), 4, universe=10, implementation=implementation)
    assert merged.tolist() == [[[1, 2, 3, 5]]]


@every_implementation
def test_many_heads_of_a_wide_universe(implementation: Implementation) -> None:
    """Positions up to the last of 10,000, in rows that are parts of wider ones."""
    random_order = torch.rand(2, 9, 10_000, generator=torch.Generator().manual_seed(3)).argsort(dim=-1).int()
    ids, counts = random_order[:, ::2, :900], int32([[900, 0, 17, 899, 900], [1, 1, 0, 0, 500]])
    for limit in (1, 700, 4000):
        merged, found = rank_union(ids, counts, limit, universe=10_000, implementation=implementation)
        expect_merged(merged, found, ranked_of(ids, counts), limit)


@needs_the_library
def test_ids_outside_the_universe_are_refused() -> None:
    for wrong in (-1, 5, 2**31 - 1, -(2**31)):
        ids = int32([[[4, 1], [wrong, 3]]])
        refused("universe", rank_union, ids, int32([[2, 2]]), 4, universe=5, implementation="native")


def test_arguments_that_do_not_fit_are_named() -> None:
    ids, counts = int32([[[0] * 3] * 2]), int32([[1, 1]])
    refused("fit", rank_union, ids, counts[0], 2, universe=9)
    refused("int32", rank_union, ids.long(), counts, 2, universe=9)
    refused("int32", rank_union, ids, counts.long(), 2, universe=9)
    refused("limit", rank_union, ids, counts, 0, universe=9)
