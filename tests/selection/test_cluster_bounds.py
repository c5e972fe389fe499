"""The cluster index over a cache: growth, taking back, batches, slots and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade.decode.indexes import Indexes
from saccade.selection.clusters.index import ClusterIndex, ClusterLayer
from saccade.selection.clusters.selector import ClusterSelector
from saccade.selection.index import KeySizes, SlotSizes, Views
from saccade.text.history import TokenHistory
from saccade.types import Intake, KVView, Rows, Selection
from trees import beside, edges_of, same

SMALL = ClusterSelector(budget=40, sinks=3, buffer=12, chunk_min=3, chunk_max=6, replant=7)
PLANT = "selection.clusters.index.plant"
LEVELS = (0, 0, 0, 1, 2, 3, 4)
"""Of the ids of a vocabulary of seven."""


@dataclass
class Cache:
    """Rows of random keys `[B, H, length, d]` and token ids `[B, length]`, in a buffer that is NaN elsewhere."""

    keys: Tensor
    ids: Tensor

    @classmethod
    def random(
        cls, length: int, *, rows: int = 1, heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.bfloat16
    ) -> Cache:
        topics = torch.randn(rows, heads, length // 20 + 1, dim).repeat_interleave(20, dim=2)[:, :, :length]
        return cls((torch.randn(rows, heads, length, dim) + topics).to(dtype), torch.randint(7, (rows, length)))

    def view(self, *lengths: int) -> KVView:
        rows, heads, whole, dim = self.keys.shape
        storage = torch.full((rows, whole + 3, heads, dim), torch.nan, dtype=self.keys.dtype)
        for row, length in enumerate(lengths):
            storage[row, :length] = self.keys[row, :, :length].transpose(0, 1)
        table = torch.arange(rows, dtype=torch.int32)[:, None]
        return KVView(storage, storage, Rows.on_host(table, [0] * rows, list(lengths)))

    def history(self) -> TokenHistory:
        history = TokenHistory(LEVELS)
        history.record(0, self.ids.shape[1], len(self.ids), self.ids, None)
        return history

    def row(self, row: int) -> Cache:
        return Cache(self.keys[row : row + 1], self.ids[row : row + 1])

    def with_others_behind(self, kept: int) -> Cache:
        """The same `kept` tokens, others behind."""
        other = Cache.random(self.ids.shape[1], rows=len(self.ids), dtype=self.keys.dtype)
        keys = torch.cat((self.keys[:, :, :kept], other.keys[:, :, kept:]), dim=2)
        return Cache(keys, torch.cat((self.ids[:, :kept], other.ids[:, kept:]), dim=1))


def update(indexes: Indexes, kv: KVView, count: int, *others: KVView, clean: int = 10**9) -> Any:
    """The last layer's index after a call whose last `count` tokens are new; `others`: caches of further layers."""
    indexes.begin(max(int(kv.rows.seq_lens.min()) - count, 0), clean)
    return [indexes.of(layer, seen) for layer, seen in enumerate((kv, *others))][-1]


def of_groups(selector: ClusterSelector, cache: Cache, lengths: Sequence[int]) -> ClusterLayer:
    """The index of one row after updates at each of `lengths`."""
    indexes = beside(selector, cache.history())
    return [update(indexes, cache.view(length), length - before) for before, length in pairwise((0, *lengths))][-1]


def expect_found(row: int, found: Selection, alone: ClusterLayer, q: Tensor, kv: KVView) -> None:
    """The sets of a row are those of its own index."""
    mine = alone.search(q[row : row + 1], kv)
    counts = mine.counts[0].tolist()
    assert found.counts[row].tolist() == counts
    for head, count in enumerate(counts):
        assert found.ids[row, head, :count].equal(mine.ids[0, head, :count])


def test_unclean_tokens_are_in_no_chunk_and_always_attended_to() -> None:
    """Also where more of them are unclean than the budget was made for."""
    cache = Cache.random(300)
    indexes, clean = beside(replace(SMALL, budget=48, every=8), cache.history()), 60
    for length in range(61, 300):
        if (length - 60) % 8 == 0 and length < 250:  # the dense pass of a rectification
            clean = length
        index = update(indexes, cache.view(length), length if length == 61 else 1, clean=clean)
        assert edges_of(index)[-1] <= clean
        found = index.search(torch.randn(1, 2, 8), cache.view(length))
        for head in range(2):
            tokens = found.ids[0, head, : int(found.counts[0, head])].tolist()
            assert {*range(3), *range(clean, length)} <= set(tokens)
            assert len(tokens) <= 48 or length > 250
    assert len(edges_of(index)) > 20


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_an_index_follows_from_its_tokens_alone(data: st.DataObject) -> None:
    """Built at once, token by token, in pieces, taken back and written anew: nothing of it is left in the index."""
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    length = data.draw(st.integers(41, 260))
    cache = Cache.random(length)
    selector = replace(SMALL, replant=data.draw(st.sampled_from([1, 2, 7, 128])))
    fresh = of_groups(selector, cache, [length])
    pieces = sorted(data.draw(st.sets(st.integers(1, length), max_size=6)) | {length})
    same(of_groups(selector, cache, pieces), fresh)
    kept = data.draw(st.integers(1, length - 1))
    other, history = cache.with_others_behind(kept), cache.history()
    history.record(0, length, 1, other.ids, None)
    indexes = beside(selector, history)
    for before, step in pairwise((0, *pieces)):
        update(indexes, other.view(step), step - before)
    history.record(0, length, 1, cache.ids, None)
    for step in (*range(kept + 1, min(kept + data.draw(st.sampled_from([0, 15])), length)), length):
        index = update(indexes, cache.view(step), step - kept if step == length else 1)
    same(index, fresh)


def test_layers_share_where_text_is_cut_and_nothing_else() -> None:
    """Layers of other keys; and rows that move before the last layer asks."""
    caches = [Cache.random(300, rows=2) for _ in range(3)]
    caches = [replace(cache, ids=caches[0].ids) for cache in caches]
    history = caches[0].history()
    indexes = beside(SMALL, history, layers=3)
    for lengths, count in (((250, 150), 250), ((260, 180), 30), ((300, 170), 40)):
        kv, *others = (cache.view(*lengths) for cache in caches)
        update(indexes, kv, count, *others)
        for number, cache in enumerate(caches):
            for row in (0, 1):
                same(indexes.of(number, kv), of_groups(SMALL, cache.row(row), [lengths[row]]), row)
    update(indexes, caches[0].view(300, 220), 0)
    order = torch.tensor([1, 0])
    history.permute(order)
    indexes.permute(order)
    caches[1] = Cache(caches[1].keys[order], caches[1].ids[order])
    index = indexes.of(1, caches[1].view(220, 300))
    for row, length in enumerate((220, 300)):
        same(index, of_groups(SMALL, caches[1].row(row), [length]), row)


def test_heads_of_an_index_choose_as_in_the_whole() -> None:
    cache, q = Cache.random(300), torch.randn(1, 4, 8)
    index = of_groups(SMALL, cache, [300])
    whole = index.search(q, cache.view(300))
    part = index.heads(1, 2).search(q[:, 2:], cache.view(300).heads(1, 2))
    count = int(part.counts[0, 0])
    assert count == int(whole.counts[0, 1])
    assert part.ids[0, 0, :count].equal(whole.ids[0, 1, :count])
    assert index.owner.nbytes > 0


def test_rows_enter_and_leave_the_slots_of_one_tree() -> None:
    """Sequences come, go, others take their slots, and slots come to it: sets and index are those of each alone."""
    rng = np.random.default_rng(0)
    cache = Cache.random(300, rows=5)
    history = cache.history()
    lengths = [45, 120, 80, 200, 60]
    in_slots, known = list[int](), dict[int, int]()
    owner = SMALL.new_slots(SlotSizes([0, 1], KeySizes.of(cache.view(*lengths)), 1, text=history))
    views = Views((0, 1), lambda some: dict.fromkeys((0, 1), kv.picked([*map(slots.index, some)])))
    for step in range(60):
        if step % 9 == 0:
            in_slots = rng.permutation(5)[: rng.integers(1, 5)].tolist()
        slots = [(sequence * 2 + step // 27) % 5 for sequence in in_slots]
        batch = Cache(cache.keys[in_slots], cache.ids[in_slots])
        kv = batch.view(*(lengths[sequence] for sequence in in_slots))
        for slot, sequence in zip(slots, in_slots, strict=True):
            history._fed[0, slot] = torch.nn.functional.pad(cache.ids[sequence], (0, history._fed.shape[2] - 300))
        owner.grow(max(*slots, step // 8) + 1, kv.rows.max_len)
        owner.place(slots, torch.tensor(slots, dtype=torch.int32))
        for slot in slots if step % 9 == 0 else ():
            owner.clear(slot)
            known[slot] = 0
        stops = [SMALL.stop(lengths[sequence], lengths[sequence] - 1) for sequence in in_slots]
        owner.take_in([Intake(slot, 0, known[slot], stop) for slot, stop in zip(slots, stops, strict=True)], views)
        known.update(zip(slots, stops, strict=True))
        q, index = torch.randn(len(slots), 4, 8), owner.layers[step % 2]
        found = index.search(q, kv)
        for row, sequence in enumerate(in_slots):
            alone = of_groups(SMALL, cache.row(sequence), [lengths[sequence]])
            same(index, alone, slots[row])
            expect_found(row, found, alone, q, cache.row(sequence).view(lengths[sequence]))
            lengths[sequence] = min(lengths[sequence] + 1, 299)


@pytest.mark.parametrize("replant", [1, 7])
def test_a_layer_that_missed_many_changes_and_a_shorter_row_has_no_trace_of_it(replant: int) -> None:
    """As where one layer goes through a long call, all of which is taken back before the next layer asks."""
    cache, selector = Cache.random(1500), replace(SMALL, replant=replant)
    indexes = beside(selector, cache.history(), layers=2)
    update(indexes, cache.view(1400), 1400, cache.view(1400))
    for length in range(300, 1400, 12):
        update(indexes, cache.view(length), 1400)
    # Some buffer ends where a chunk is decided on, and so does a group.
    for length in range(306, 149, -12):
        index = update(indexes, cache.view(length), 1, cache.view(length))
        same(index, of_groups(selector, cache, [length]))
    assert int(index.search(torch.randn(1, 4, 8), cache.view(150)).ids.max()) == 149


def test_tokens_of_one_call_choose_as_if_they_had_come_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the ends of buffers: the second layer begins where the first has been through all of them.

    Nothing is indexed anew but where the third call begins, before the second one's end.
    """
    clear, cleared = ClusterIndex.clear, list[int]()
    monkeypatch.setattr(ClusterIndex, "clear", lambda index, slot: cleared.append(slot) or clear(index, slot))
    cache, q = Cache.random(300), torch.randn(1, 4, 8)
    indexes = beside(SMALL, cache.history(), layers=2)
    for past, stop in ((0, 126), (126, 150), (140, 200), (200, 201)):
        indexes.begin(past, 300)
        for layer in (0, 1):
            for length in range(max(past, 125) + 1, stop + 1):
                kv, index = cache.view(length), indexes.of(layer, cache.view(length))
                alone = of_groups(SMALL, cache, [length])
                same(index, alone)
                expect_found(0, index.search(q, kv), alone, q, kv)
    assert cleared == [0]


def test_an_interrupted_update_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first layer, and in one behind it, whose text was cut before."""
    cache = Cache.random(300)
    indexes = beside(SMALL, cache.history(), layers=2)
    update(indexes, cache.view(150), 150, cache.view(150))
    for length, layer, broken in ((175, 0, "text.table._reached"), (200, 0, PLANT), (225, 1, PLANT)):
        if layer:
            update(indexes, cache.view(length), 1)
        with monkeypatch.context() as patch:
            patch.setattr(f"saccade.{broken}", None)
            with pytest.raises(TypeError, match="NoneType"):
                indexes.of(layer, cache.view(length))
        kv = cache.view(length + 1)
        update(indexes, kv, 1, kv)
        for number in (0, 1):
            same(indexes.of(number, kv), of_groups(SMALL, cache, [length + 1]))
