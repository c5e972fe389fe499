"""The union's kernels in Triton's interpreter, in many tiles, and what the compiler makes of them."""

import random
from collections.abc import Iterator

import pytest
from compiling import compile_kernel, expect_fit, pointers, signature_of
from kernel_checks import DEVICES
from test_rank_union import (
    expect_union,
    test_rank_union_matches_the_oracle,  # noqa: F401 - of the kernels
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


POINTERS = (
    "ids counts firsts whole_ids whole_counts whole_firsts earliest lengths short ends numbers merged found".split()
)
KERNELS = {
    "_meet": {"TILE": 2048},
    "_count_firsts": {"TILE": 2048},
    "_clear": {"TILE": 2048},
    "_find_short": {"ROUNDS": 4},
    "_count_members": {"RESTED": True, "ROUNDS": 64, "TILE": 2048},
    "_write_members": {"SPLITS": 64, "TILE": 2048},
}


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiled_without_spills(kernel: str, capability: int) -> None:
    signature = signature_of(getattr(kernels, kernel), dict.fromkeys(POINTERS, "*i32"))
    compiled = compile_kernel(MODULE, kernel, signature, KERNELS[kernel], pointers(signature), capability=capability)
    expect_fit(compiled, 128)
