"""Roles per KV head: any legal mixture in one layer, token and page units, one set per KV head or per query head."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.harness import check_outputs
from methods.layouts import Batch
from mixtures import MIXTURES, PAGE, decoder_of, expected, role_map
from saccade.errors import PolicyError
from saccade.plans.plan import Plan
from saccade.selection.rules import RankUnion
from saccade.selection.scorers.exact import ExactScorer
from saccade.selection.selector import ScoredSelector
from saccade.types import Pooling

LAYERS = 4


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


DRAWN = [("drawn", scorer, pooling) for scorer in ("exact", "page_bounds") for pooling in ("max", "mean", "each")]


@pytest.mark.parametrize(("mixture", "scorer", "pooling"), [*((name, None, None) for name in MIXTURES), *DRAWN])
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=7, deadline=None)
def test_mixture_matches_the_oracle(
    mixture: str, scorer: str | None, pooling: Pooling | None, data: st.DataObject, seed: int, dtype: torch.dtype
) -> None:
    def drawn(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    roles = MIXTURES.get(mixture) or data.draw(role_maps(data.draw(st.integers(1, 5))))
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    scorer, pooling = scorer or drawn("exact", "exact", "page_bounds"), pooling or drawn("max", "mean", "each")
    layout, budget = drawn("padded", "paged"), data.draw(st.integers(PAGE, 24))
    sizes = {"layers": len(roles), "kv_heads": len(roles[0]), "group": drawn(1, 2, 4, 8)}
    batch = Batch.random(np.random.default_rng(seed), lengths, content=drawn("spread", "clustered"), **sizes)
    decoder = decoder_of(roles, scorer, pooling, budget)
    for _ in range(3):
        batch.step()
        sets, outputs = decoder.step(batch, layout, dtype)
        assert sets == expected(batch, roles, scorer, pooling, budget)
        check_outputs(batch, sets, outputs, dtype)


def test_batch_may_shrink_between_steps() -> None:
    """A partial refresh never mixes with sets of rows that have left."""
    roles = [["publish", "dense"], ["dense", "publish"], ["reuse", "reuse"]]
    batch = Batch.random(np.random.default_rng(0), [20, 30, 25], layers=3, kv_heads=2, group=2)
    decoder = decoder_of(roles, "exact", "max", 6)
    for rows in ([0, 1, 2], [1, 2], [1]):
        batch.select(rows)
        batch.step()
        sets, _ = decoder.step(batch, "padded", torch.float32, begin=False)
        assert sets == expected(batch, roles, "exact", "max", 6)


def test_one_set_for_all_heads_needs_uniform_layers() -> None:
    selector = ScoredSelector(ExactScorer("each"), RankUnion(budget=8, sinks=2, recent=0.25), heads="all")
    with pytest.raises(PolicyError, match="mixes roles"):
        Plan(selector, role_map([["publish", "dense"]]))


def test_reuse_without_a_refresher_is_refused() -> None:
    with pytest.raises(PolicyError, match="KV head 1 of layer 1 reuses a selection, but no layer below refreshes head"):
        role_map([["publish", "dense"], ["reuse", "reuse"]])
