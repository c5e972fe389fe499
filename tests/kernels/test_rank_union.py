"""LessIsMore's union on CPUs: its worked example, wide universes, and what does not fit."""

import torch
from kernel_caches import int32
from kernel_checks import every_implementation, needs_the_library, refused
from rank_union_contract import (
    expect_merged,
    rank_union,
    ranked_of,
    test_a_row_that_fits_is_its_own_set_whatever_its_lists_say,  # noqa: F401 - of these implementations
    test_rank_union_matches_the_oracle,  # noqa: F401
    test_the_union_between_sinks_and_a_window,  # noqa: F401
    test_whole_lists_are_asked_for_where_their_beginnings_fall_short,  # noqa: F401
)

from saccade.kernels._dispatch import Implementation


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
