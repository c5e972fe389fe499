"""Budget at or above the context: the same tokens as the stock sdpa model, however one generates."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch

import saccade
from forcing import sparse_below_the_budget
from walking import crossed

from . import tiny
from .ways import NEW, STATIC_RECTIFIED, WAYS, every_time


@functools.cache
def stock(way: str) -> torch.Tensor:
    return WAYS[way](tiny.llama())


@pytest.mark.parametrize("shortcut", [True, False], ids=["dense shortcut", "sparse path"])
@pytest.mark.parametrize(("policy", "way"), crossed(tiny.COVERING, WAYS, every_time))
def test_same_tokens_as_stock(policy: str, shortcut: bool, way: str, request: pytest.FixtureRequest) -> None:
    if policy in ("resa", "tidal, rectified") and "static" in way and not shortcut:
        request.applymarker(STATIC_RECTIFIED)
    expected = stock(way)
    with (
        nullcontext() if shortcut else sparse_below_the_budget(),
        saccade.sparsify(tiny.llama(), tiny.spec(policy)) as run,
    ):
        tokens = WAYS[way](tiny.llama())
        assert run.stats().steps > 0
        assert run.stats().share_attended == pytest.approx(1.0)
    assert tokens.tolist() == expected.tolist()


def test_ways_differ_enough_to_test_something() -> None:
    """Random models may repeat one token: then equality would prove little."""
    continuations = {way: stock(way)[:, -NEW:] for way in WAYS}
    assert all(len(tokens.unique()) > 3 for tokens in continuations.values())
