"""Quest's bounds over chunks of text, step by step against the float64 oracle: on a grid, so that sets are exact."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles_chunks import chunk_sets

import claims  # noqa: F401  # registers the method
import saccade
from methods.harness import Decoder, check_outputs
from methods.layouts import LEVELS, Batch
from methods.oracles_composed import Cut, always, by_roles
from saccade.errors import PolicyError
from saccade.types import ModelShape

UNKNOWN = len(LEVELS)
"""A token that is not in the vocabulary."""


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    shortest = draw(st.integers(1, 5))
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "lengths": draw(st.lists(st.integers(1, 30) | st.integers(30, 90), min_size=1, max_size=3)),
        "sizes": {"kv_heads": draw(st.integers(1, 2)), "group": draw(st.sampled_from([1, 2, 4]))},
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "shortest": shortest,
        "longest": draw(st.integers(shortest, 9)),
        "spare": draw(st.sampled_from([1, 2, 6, 12, 41])),
    }


@given(drawn=situations(), cut=st.integers(1, 20), data=st.data())
@settings(max_examples=12, deadline=None)
def test_sets_are_those_of_the_oracle(drawn: dict[str, Any], cut: int, data: st.DataObject) -> None:
    """Over several new chunks; then tokens are taken back and others fed, and rows move."""
    sizes = {"shortest": drawn["shortest"], "longest": drawn["longest"]}
    budget = sizes["longest"] + drawn["spare"]
    batch = Batch.random(
        np.random.default_rng(drawn["seed"]), [n + 20 for n in drawn["lengths"]], layers=2, **drawn["sizes"]
    )
    for ids in batch.ids[1:]:
        ids[: len(ids) // 2 : 7] = [UNKNOWN] * len(ids[: len(ids) // 2 : 7])
    options = {"budget": budget, "chunk_min": sizes["shortest"], "chunk_max": sizes["longest"], "dense_layers": 1}
    shape = ModelShape(2, batch.kv_heads * batch.group, batch.kv_heads, batch.dim)
    decoder = Decoder(saccade.policy("text_pages", **options).plan(shape))

    def expected(row: int) -> list[list[list[int]]]:
        levels = [LEVELS[token] if token < UNKNOWN else None for token in batch.ids[row]]

        def choose(layer: int, q: Any, k: Any) -> list[Cut]:
            return [Cut(chosen) for chosen in chunk_sets(q, k, levels, budget=budget, **sizes)]

        return by_roles(batch.q[row], batch.k[row], always(2, batch.kv_heads, 1), choose).sets

    def steps(count: int) -> None:
        for _ in range(count):
            batch.step()
            sets, outputs = decoder.step(batch, "padded", drawn["dtype"])
            assert sets == [expected(row) for row in range(len(sets))]
            check_outputs(batch, sets, outputs, drawn["dtype"])

    steps(12)
    batch.crop(cut)
    decoder.begin(batch)
    steps(3)
    rows = [*data.draw(st.lists(st.integers(0, len(drawn["lengths"]) - 1), max_size=2))]
    rows.append(batch.lengths.index(max(batch.lengths)))  # buffers do not shrink when rows leave
    batch.select(rows)
    decoder.permute(rows)
    steps(6)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PolicyError, match="policy text_pages: chunk_min=8, chunk_max=20 and budget=20 do not ascend"):
        saccade.policy("text_pages", budget=20)
