"""One query head's set for its group, step by step against naive loops."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import claims  # noqa: F401  # registers the method
import saccade
from methods.harness import Decoder
from methods.layouts import Batch
from methods.oracles_composed import Cut, always, by_roles, persistent, top_k
from oracles import raw_scores
from saccade.types import ModelShape


def drawn_head(length: int, heads: int) -> int:
    """Which of a group's heads is heard by a row of so many tokens; the draw itself is ours."""
    mixed = length * 2654435761 % 2**32
    mixed = (mixed ^ mixed // 2**16) * 1540483477 % 2**32
    return mixed // 2**8 % heads


def test_every_head_is_drawn_as_often() -> None:
    counts = np.bincount([drawn_head(length, 3) for length in range(1, 3001)])
    # Six standard deviations of 3,000 draws.
    assert len(counts) == 3 and abs(counts - 1000).max() < 6 * (3000 * 2 / 9) ** 0.5


@pytest.mark.parametrize("roles", ["select", "layers:2+4"])
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 40),
    framed=st.booleans(),
)
@settings(max_examples=6, deadline=None)
def test_sets_are_those_of_one_head(
    roles: str, seed: int, lengths: list[int], kv_heads: int, group: int, budget: int, framed: bool
) -> None:
    batch = Batch.random(np.random.default_rng(seed), lengths, layers=6, kv_heads=kv_heads, group=group)
    shape = ModelShape(6, kv_heads * group, kv_heads, batch.dim)
    frame = {"sinks": budget // 3, "window": budget // 4} if framed else {}
    decoder = Decoder(saccade.policy("random_head", budget=budget, roles=roles, dense_layers=2, **frame).plan(shape))
    by_layer = always(6, kv_heads, 2) if roles == "select" else persistent(6, kv_heads, 2, [2, 4])

    def choose(layer: int, q: Any, k: Any) -> list[Cut]:
        length = k.shape[1]
        scores = raw_scores(q, k, "each")[drawn_head(length, group) :: group]
        return [top_k(budget, **frame)(row, length, 1) for row in scores for _ in range(group)]

    for _ in range(3):
        batch.step()
        sets, _ = decoder.step(batch, "paged", torch.float32)
        assert [
            [[sorted(chosen) for chosen in layer] for layer in by_roles(q, k, by_layer, choose).sets]
            for q, k in zip(batch.q, batch.k, strict=True)
        ] == sets
