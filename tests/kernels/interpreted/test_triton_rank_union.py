"""The union's kernels in Triton's interpreter, in many tiles, and what the compiler makes of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from compiling import compile_kernel, expect_fit, pointers
from kernel_checks import DEVICES
from rank_union_contract import (
    expect_union,
    test_a_row_that_fits_is_its_own_set_whatever_its_lists_say,  # noqa: F401 - of the kernels
    test_rank_union_matches_the_oracle,  # noqa: F401
    test_the_union_between_sinks_and_a_window,  # noqa: F401
    test_whole_lists_are_asked_for_where_their_beginnings_fall_short,  # noqa: F401
)

from saccade.kernels.rank_union import triton as kernels

MODULE = "saccade.kernels.rank_union.triton"


@pytest.fixture(autouse=True, scope="module")
def _small_tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TILE", 16)
        yield


def test_a_limit_that_falls_on_the_end_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads that never agree fill 64 of 64 places in the first tile of turns; the next turn is left out."""
    monkeypatch.setattr(kernels, "TILE", 64)
    for limit in (63, 64, 65, 200, 201):
        expect_union([[list(range(0, 200, 2)), list(range(1, 200, 2))]], 100, 200, limit, "triton")


def test_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TILE", 2048)
    pick = random.Random(5)
    expect_union([[pick.sample(range(5003), 700) for _ in range(7)]], 701, 5003, 2500, "triton")


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
