"""Caches of 8-bit floats: the reference against float64 loops. That faster forms refuse is in `test_refusals`."""

from __future__ import annotations

import torch
from quantised import (
    small,
    test_a_pages_score_bounds_those_of_its_tokens,  # noqa: F401 - of the reference
    test_attention_matches_the_oracle,  # noqa: F401
    test_bounds_are_numbers_of_the_cache,  # noqa: F401
)

from saccade.kernels.dense_decode_scores.api import dense_decode_scores


def test_a_number_that_is_none_shows_where_it_is_read_and_nowhere_else() -> None:
    """8 bits have a NaN: within a row it reaches that row's head, behind a row nothing reads it."""
    case = small()
    case.kv.k[case.kv.rows.page_table[1, 0], 4 + int(case.kv.rows.row_start[1]), 0, 3] = torch.nan
    out, _ = dense_decode_scores(case.q, case.kv, case.softmax, implementation="reference")
    assert out.isnan().any(dim=-1).tolist() == [[False] * 4, [True, True, False, False]]
