"""Roles per KV head: any legal mixture in one layer, token and page units, one set per KV head or per query head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.errors import PolicyError
from saccade.plan import Plan
from saccade.roles import RoleMap
from saccade.rules import RankUnion, TopK
from saccade.scorers.exact import ExactScorer
from saccade.scorers.page_bounds import PageBoundScorer
from saccade.select import ScoredSelector
from saccade.types import Role

from . import oracles
from .harness import Decoder, check_outputs
from .layouts import Batch

LAYERS, PAGE = 4, 4


@st.composite
def role_maps(draw: st.DrawFn, kv_heads: int) -> list[list[str]]:
    """Random roles; a head may reuse only what a layer below has refreshed."""
    refreshed: set[int] = set()
    roles = []
    for _ in range(LAYERS):
        layer = []
        for head in range(kv_heads):
            legal = ["dense", "publish", "select", *(["reuse"] * 3 if head in refreshed else [])]
            layer.append(draw(st.sampled_from(legal)))
        roles.append(layer)
        refreshed.update(head for head, role in enumerate(layer) if role in ("publish", "select"))
    return roles


def role_map(roles: list[list[str]]) -> RoleMap:
    return RoleMap(tuple(tuple(Role(role) for role in layer) for layer in roles))


@pytest.mark.parametrize("unit", ["token", "page"])
@pytest.mark.parametrize("heads", ["kv", "query"])
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=15, deadline=None)
def test_mixture_matches_the_oracle(unit: str, heads: str, data: st.DataObject, seed: int, dtype: torch.dtype) -> None:
    kv_heads = data.draw(st.integers(1, 4))
    roles = data.draw(role_maps(kv_heads))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    layout = data.draw(st.sampled_from(["padded", "paged"]))
    budget = data.draw(st.integers(PAGE, 24))
    rng, group = np.random.default_rng(seed), data.draw(st.sampled_from([1, 2, 4]))
    content = data.draw(st.sampled_from(["spread", "clustered"]))
    batch = Batch.random(rng, lengths, layers=LAYERS, kv_heads=kv_heads, group=group, content=content)
    pooling = "max" if heads == "kv" else "each"
    scorer = ExactScorer(pooling) if unit == "token" else PageBoundScorer(PAGE, pooling)
    decoder = Decoder(Plan(ScoredSelector(scorer, TopK(budget), heads), role_map(roles)))

    def choose(q: np.ndarray, k: np.ndarray) -> list[list[int]]:
        if k.shape[1] <= budget:
            return oracles.everything(q, k)
        if unit == "token":
            return oracles.top_tokens(q, k, budget, heads)
        return oracles.top_pages(q, k, budget, PAGE, heads)

    for _ in range(3):
        batch.step()
        sets, outputs = decoder.step(batch, layout, dtype)
        assert sets == [oracles.mixed(q, k, roles, choose) for q, k in zip(batch.q, batch.k, strict=True)]
        check_outputs(batch, sets, outputs, dtype)


def test_batch_may_shrink_between_steps() -> None:
    """A partial refresh never mixes with sets of rows that have left."""
    roles = [["publish", "dense"], ["dense", "publish"], ["reuse", "reuse"]]
    batch = Batch.random(np.random.default_rng(0), [20, 30, 25], layers=3, kv_heads=2, group=2)
    decoder = Decoder(Plan(ScoredSelector(ExactScorer("max"), TopK(6)), role_map(roles)))
    for rows in ([0, 1, 2], [1, 2], [1]):
        batch.select(rows)
        batch.step()
        sets, _ = decoder.step(batch, "padded", torch.float32)
        expected = [
            oracles.mixed(q, k, roles, lambda q, k: oracles.top_tokens(q, k, 6, "kv"))
            for q, k in zip(batch.q, batch.k, strict=True)
        ]
        assert sets == expected
        rows = rows[1:]


def test_reuse_without_a_refresher_is_refused() -> None:
    with pytest.raises(
        PolicyError, match="KV head 1 of layer 1 reuses a selection, but no layer below refreshes head 1"
    ):
        role_map([["publish", "dense"], ["reuse", "reuse"]])
    with pytest.raises(PolicyError, match="KV head 0 of layer 0"):
        role_map([["reuse"]])


def test_one_set_for_all_heads_needs_uniform_layers() -> None:
    selector = ScoredSelector(ExactScorer("each"), RankUnion(budget=8, sinks=2, recent=0.25), heads="all")
    with pytest.raises(PolicyError, match="mixes roles"):
        Plan(selector, role_map([["publish", "dense"]]))
