"""What `ChunkSelector` says of its sets and of the bytes they cost, against an index that was built."""

from __future__ import annotations

import pytest
import torch

from saccade.methods.policy import Policy
from saccade.plans.plan import Plan
from saccade.plans.roles import RoleMap
from saccade.selection.chunks.selector import ChunkSelector
from saccade.selection.history import TokenHistory
from saccade.selection.selector import Bytes, NewTokens
from saccade.types import KVView, ModelShape, Role, Rows

HEAD_DIM, KV_HEADS, GROUP = 8, 2, 3


def cache(length: int) -> KVView:
    torch.manual_seed(length)
    keys = torch.randn(1, length, KV_HEADS, HEAD_DIM)
    return KVView(keys, keys, Rows.on_host(torch.zeros(1, 1, dtype=torch.int32), [0], [length]))


@pytest.mark.parametrize("length", [700, 1513, 3001])
def test_the_index_that_is_counted_is_the_one_that_is_built(length: int) -> None:
    """With chunks of one length nothing is left to the text: counted are the chunks, up to the one that is open."""
    selector, kv = ChunkSelector(budget=100, chunk_min=16, chunk_max=16), cache(length)
    index = selector.new_index(kv, TokenHistory())
    index.update(kv, NewTokens(kv.rows, length))
    chunks = int(index.table.counts[0])
    vector = HEAD_DIM * 4
    taken = (100 - 8 - 1) / 16
    counted = (selector.search(length, HEAD_DIM, 4).read - 2 * taken * 4) / (2 * vector)
    assert abs(counted - chunks) < 0.5
    assert selector.scores(length, GROUP) == Bytes(counted * 4, counted * 4)
    # A row's worth of tokens is read once, and every chunk's bounds and edge written once.
    assert selector.upkeep(length, 1600, 0, HEAD_DIM, 4) == Bytes(1600 * vector, 100 * (2 * vector + 4))
    assert selector.upkeep(length, 0, 32, HEAD_DIM, 4) == Bytes()


@pytest.mark.parametrize("length", [20, 25, 60, 61, 80, 400])
def test_a_set_is_as_large_as_said(length: int) -> None:
    """Full but for less than the next chunk; while the budget covers the row it is the row."""
    selector, kv = ChunkSelector(budget=60), cache(length)
    index = selector.new_index(kv, TokenHistory([1, 2, 3, 4, 0]))
    ids = torch.randint(5, (1, length), generator=torch.Generator().manual_seed(length))
    index.history.record(0, length, 1, ids, None)
    index.update(kv, NewTokens(kv.rows, length))
    chosen = selector.select(torch.randn(1, KV_HEADS * GROUP, HEAD_DIM), kv, index, None, 1.0)
    size = selector.size(length)
    assert chosen.counts.max() <= size
    assert chosen.counts.min() > (length - 1 if selector.covers(length) else size - selector.longest)
    assert chosen.groups == KV_HEADS


def test_a_set_per_query_head_stores_every_heads_scores() -> None:
    shape = ModelShape(4, KV_HEADS * GROUP, KV_HEADS, HEAD_DIM)
    shared, each = (
        Policy.from_spec(f"composed:scorer=page_bounds,chunking=text,heads={heads},budget=64").plan(shape).selector
        for heads in ("kv", "query")
    )
    assert isinstance(shared, ChunkSelector) and isinstance(each, ChunkSelector)
    assert each.scores(900, GROUP) == shared.scores(900, GROUP).times(GROUP)
    assert each.search(900, HEAD_DIM, 2) == shared.search(900, HEAD_DIM, 2)
    assert "chunks of 14 tokens" in shared.assumption
    kv = cache(90)
    index = each.new_index(kv, TokenHistory())
    index.update(kv, NewTokens(kv.rows, 90))
    assert each.select(torch.randn(1, 6, HEAD_DIM), kv, index, None, 1.0).groups == 6
    assert Plan(shared, RoleMap.by_layer([Role.DENSE, Role.SELECT], KV_HEADS)).refreshing == {1}
