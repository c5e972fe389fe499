"""Budget at or above the context: the same tokens as the stock sdpa model, however one generates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import saccade
from forcing import sparse_below_the_budget
from walking import crossed

from . import tiny
from .ways import HARD, NEW, STATIC_RECTIFIED, WAYS, every_time


@functools.cache
def stock(way: str) -> torch.Tensor:
    return WAYS[way](tiny.llama())


def check(policy: str, way: str) -> None:
    expected = stock(way)
    with saccade.sparsify(tiny.llama(), tiny.spec(policy)) as run:
        tokens = WAYS[way](tiny.llama())
        assert run.stats().steps > 0
        assert run.stats().share_attended == pytest.approx(1.0)
    assert tokens.tolist() == expected.tolist()


INDEXED_ALIKE = "token_clusters"
"""Its index comes and goes as that of `lychee_cluster` does, which meets all ways; this one the hard ones."""


def with_ways(every_time: Callable[[Any, Any], bool]) -> list[Any]:
    others = [name for name in tiny.COVERING if name != INDEXED_ALIKE]
    return [*crossed(others, WAYS, every_time), *((INDEXED_ALIKE, way) for way in HARD)]


@pytest.mark.parametrize(("policy", "way"), with_ways(every_time))
def test_same_tokens_as_stock_on_the_sparse_path(policy: str, way: str, request: pytest.FixtureRequest) -> None:
    if policy in ("resa", "tidal, rectified") and "static" in way:
        request.applymarker(STATIC_RECTIFIED)
    with sparse_below_the_budget():
        check(policy, way)


@pytest.mark.parametrize(("policy", "way"), with_ways(lambda policy, way: policy == "quest" or way == "left-padded"))
def test_same_tokens_as_stock_by_the_dense_shortcut(policy: str, way: str) -> None:
    check(policy, way)


def test_ways_differ_enough_to_test_something() -> None:
    """Random models may repeat one token: then equality would prove little."""
    continuations = {way: stock(way)[:, -NEW:] for way in WAYS}
    assert all(len(tokens.unique()) > 3 for tokens in continuations.values())
