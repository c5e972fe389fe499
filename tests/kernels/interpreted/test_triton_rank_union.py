"""The union's kernels in Triton's interpreter, and what the compiler makes of them."""

from __future__ import annotations

import random
from typing import Literal

import pytest
import torch
from compiling import compile_kernel, expect_fit, pointers
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import DEVICES
from test_rank_union import expect_union, lists_of, rankings
from torch import Tensor

import oracles
from saccade.kernels.rank_union import triton as kernels
from saccade.kernels.rank_union.api import framed_rank_union
from walking import drawn

MODULE = "saccade.kernels.rank_union.triton"


def expect_framed(
    ranked: list[list[list[int]]], lengths: list[int], frame: tuple[int, int, int], merged: Tensor, found: Tensor
) -> None:
    """Each row's sinks, its window and the union of the lists between them; `frame` is sinks, limit and window."""
    sinks, limit, window = frame
    for row, length in enumerate(lengths):
        wanted = {*range(length)[:sinks], *range(length)[-window:]}
        wanted |= {sinks + position for position in oracles.rank_union(ranked[row], limit)}
        assert found[row].tolist() == [len(wanted)]
        assert merged[row, 0].tolist() == sorted(wanted) + [-1] * (sum(frame) - len(wanted))


@drawn(30)
@given(
    st.integers(1, 2),
    st.integers(1, 9),
    st.integers(1, 90),
    st.integers(1, 120),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from((16, 64)),
    st.integers(0, 2**31),
)
def test_the_oracle_in_many_tiles(
    batch: int, heads: int, universe: int, limit: int, slack: int, agreeing: bool, tile: int, seed: int
) -> None:
    ranked = rankings(batch, heads, universe, seed, agreeing=agreeing)
    width = max(len(choices) for row in ranked for choices in row) + slack or 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TILE", tile)
        expect_union(ranked, width, universe, limit, "triton")


def test_a_limit_that_falls_on_the_end_of_a_tile() -> None:
    """Two heads that never agree fill 64 of 64 places in the first tile of turns; the next turn is left out."""
    ranked = [[list(range(0, 200, 2)), list(range(1, 200, 2))]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TILE", 64)
        for limit in (63, 64, 65, 200, 201):
            expect_union(ranked, 100, 200, limit, "triton")


def test_whole_tiles() -> None:
    pick = random.Random(5)
    expect_union([[pick.sample(range(5003), 700) for _ in range(7)]], 701, 5003, 2500, "triton")


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_the_union_between_sinks_and_a_window(implementation: Literal["triton", "reference"]) -> None:
    """Rows of which the sinks and the window leave something, or nothing, and one shorter than its sinks."""
    pick = random.Random(6)
    sinks, window, limit, lengths = 3, 6, 11, [50, 12, 9, 8, 2, 0]
    middles = [max(length - sinks - window, 0) for length in lengths]
    ranked = [[pick.sample(range(middle), middle) for _ in range(2)] for middle in middles]
    merged, found = framed_rank_union(
        *lists_of(ranked, 41),
        torch.tensor(lengths, dtype=torch.int32),
        limit,
        sinks=sinks,
        window=window,
        universe=47,
        implementation=implementation,
    )
    expect_framed(ranked, lengths, (sinks, limit, window), merged, found)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_row_that_fits_is_its_own_set_whatever_its_lists_say(implementation: Literal["triton", "reference"]) -> None:
    lengths = [20, 21, 7, 0]
    merged, found = framed_rank_union(
        torch.tensor([[[0, 3, 2, -1]]] * 4, dtype=torch.int32),
        torch.tensor([[0], [3], [3], [3]], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        11,
        sinks=3,
        window=6,
        universe=40,
        implementation=implementation,
    )
    assert found.flatten().tolist() == [20, 12, 7, 0]
    for row in (0, 2, 3):
        assert merged[row, 0].tolist() == [*range(lengths[row])] + [-1] * (20 - lengths[row])
    assert merged[1, 0].tolist() == [0, 1, 2, 3, 5, 6, 15, 16, 17, 18, 19, 20] + [-1] * 8


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@drawn(15)
@given(st.integers(1, 9), st.integers(2, 90), st.integers(1, 60), st.integers(1, 40), st.integers(0, 2**31))
def test_whole_lists_are_asked_for_where_their_beginnings_fall_short(
    implementation: Literal["triton", "reference"], heads: int, universe: int, limit: int, first: int, seed: int
) -> None:
    """Rows of heads that agree, of heads that do not, and without any list; memory that nothing was written to is odd.

    A row ends anywhere behind the tokens that its lists name, in a universe that may be wider.
    """
    pick = random.Random(seed)
    shared = pick.sample(range(universe), pick.randint(1, universe))
    own = [pick.sample(range(universe), universe) for _ in range(heads)]
    ranked, sinks, window = [[shared] * heads, own, [[]] * heads], 2, 3
    lengths = [max(universe + sinks + window, limit + sinks + window + 1) + pick.randint(0, 9) for _ in range(2)] + [5]

    def lists(rows: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The beginnings of some rows' lists; those of the others are empty."""
        held = [[one[:width] if row in rows else [] for one in choices] for row, choices in enumerate(ranked)]
        return lists_of(held, width)

    asked: list[list[int]] = []

    def rest(short: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert all(length in (0, lengths[row]) for row, length in enumerate(short.tolist()))
        asked.append([row for row, length in enumerate(short.tolist()) if length])
        return lists(asked[-1], universe)

    empty, new_empty = torch.empty, torch.Tensor.new_empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TILE", 16)
        patch.setattr(torch, "empty", lambda *sizes, **others: empty(*sizes, **others).fill_(77))
        patch.setattr(
            torch.Tensor, "new_empty", lambda own, *sizes, **others: new_empty(own, *sizes, **others).fill_(77)
        )
        merged, found = framed_rank_union(
            *lists([0, 1, 2], first),
            torch.tensor(lengths, dtype=torch.int32),
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


LISTS = {"ids": "*i32", "counts": "*i32", "width": "i32"}
COUNTED = {**LISTS, "firsts": "*i32"}
TURNS = {"heads": "i32", "earliest": "*i32", "universe": "i32"}
WHOLE = {f"whole_{name}": kind for name, kind in {**COUNTED, "rounds": "i32"}.items()}
KERNELS = {
    "_meet": (LISTS | TURNS, {"TILE": 2048}),
    "_count_firsts": (COUNTED | TURNS, {"TILE": 2048}),
    "_clear": (
        {"earliest": "*i32", "universe": "i32", "lengths": "*i32", "size": "i32"},
        {"FRAMED": True, "TILE": 2048},
    ),
    "_find_short": (
        {"firsts": "*i32", "rounds": "i32", "lengths": "*i32", "limit": "i32", "size": "i32", "short": "*i32"},
        {"ROUNDS": 4},
    ),
    "_count_members": (
        COUNTED
        | {"rounds": "i32"}
        | WHOLE
        | {"short": "*i32"}
        | TURNS
        | {"lengths": "*i32", "limit": "i32", "ends": "*i32", "numbers": "*i32"},
        {"FRAMED": True, "RESTED": True, "ROUNDS": 64, "TILE": 2048},
    ),
    "_write_members": (
        {"earliest": "*i32", "universe": "i32", "ends": "*i32", "numbers": "*i32", "splits": "i32", "size": "i32"}
        | {"merged": "*i32", "found": "*i32", "lengths": "*i32", "sinks": "i32", "window": "i32"},
        {"FRAMED": True, "SPLITS": 64, "TILE": 2048},
    ),
}


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiled_without_spills(kernel: str, capability: int) -> None:
    signature, constants = KERNELS[kernel]
    compiled = compile_kernel(MODULE, kernel, signature, constants, pointers(signature), capability=capability)
    expect_fit(compiled, 128)
