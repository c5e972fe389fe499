"""Budget at or above the context: the same tokens as the stock sdpa model, however one generates."""

import functools

import pytest
import torch

import saccade
from forcing import sparse_below_the_budget

from . import tiny
from .ways import NEW, STATIC_RECTIFIED, WAYS, by_kind


@functools.cache
def stock(way: str) -> torch.Tensor:
    return WAYS[way](tiny.llama())


@pytest.mark.parametrize(("policy", "way"), by_kind(tiny.COVERING, also=("tidal, rectified",)))
def test_same_tokens_as_stock_on_the_sparse_path(policy: str, way: str, request: pytest.FixtureRequest) -> None:
    if policy == "tidal, rectified" and "static" in way:
        request.applymarker(STATIC_RECTIFIED)
    expected = stock(way)
    with sparse_below_the_budget(), saccade.sparsify(tiny.llama(), tiny.spec(policy)) as run:
        tokens = WAYS[way](tiny.llama())
        assert run.stats().steps > 0
        assert run.stats().share_attended == pytest.approx(1.0)
    assert tokens.tolist() == expected.tolist()


def test_ways_differ_enough_to_test_something() -> None:
    """Random models may repeat one token: then equality would prove little."""
    continuations = {way: stock(way)[:, -NEW:] for way in WAYS}
    assert all(len(tokens.unique()) > 3 for tokens in continuations.values())
