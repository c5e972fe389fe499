"""The cluster index over a cache: bounds that hold after thousands of updates, growth, taking back, batches, copies."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from methods.layouts import Batch
from saccade.kernels.chunk_keys.api import chunk_keys
from saccade.selection.clusters.index import UNDONE, ClusterIndex
from saccade.selection.clusters.selector import ClusterSelector
from saccade.selection.clusters.tree import graft, plant
from saccade.selection.history import ALL_CLEAN, TokenHistory
from saccade.types import KVView, Rows, Selection

SMALL = ClusterSelector(budget=40, sinks=3, buffer=12, chunk_min=3, chunk_max=6)


@dataclass
class Text(TokenHistory):
    """A history whose delimiter levels are given in logical order; slots are counted from each row's start."""

    by_row: list[list[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    clean: int = ALL_CLEAN

    def levels_of(self, row: int, start: int, stop: int) -> list[int] | None:
        first = self.starts[row]
        assert start >= first, "never before the row's first token"
        return self.by_row[row][start - first : stop - first]


def text(rng: np.random.Generator, lengths: Sequence[int], starts: Sequence[int] | None = None) -> Text:
    levels = [rng.choice([0, 0, 0, 1, 2, 3, 4], length + 100).tolist() for length in lengths]
    return Text(by_row=levels, starts=list(starts or [0] * len(lengths)))


@dataclass
class Cache:
    """One row of `length` random keys `[H, length, d]`, in a buffer that is NaN elsewhere, seen at any length."""

    keys: Tensor

    @classmethod
    def random(cls, length: int, *, heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.bfloat16) -> Cache:
        topics = torch.randn(heads, length // 20 + 1, dim).repeat_interleave(20, dim=1)[:, :length]
        return cls((torch.randn(heads, length, dim) + topics).to(dtype))

    def view(self, length: int) -> KVView:
        heads, _, dim = self.keys.shape
        storage = torch.full((1, length + 3, heads, dim), torch.nan, dtype=self.keys.dtype)
        storage[0, :length] = self.keys[:, :length].transpose(0, 1)
        return KVView(storage, storage, Rows.on_host(torch.zeros(1, 1, dtype=torch.int32), [0], [length]))


def update(index: ClusterIndex, kv: KVView, count: int) -> None:
    index.update(kv, (kv.rows.seq_lens - count).clamp(min=0), count)


def indexed(selector: ClusterSelector, cache: Cache, history: TokenHistory, lengths: Sequence[int]) -> ClusterIndex:
    """The index after updates at each of `lengths`."""
    index = selector.new_index(cache.view(lengths[0]), history)
    for before, length in pairwise((0, *lengths)):
        update(index, cache.view(length), length - before)
    return index


def nodes(index: ClusterIndex, row: int = 0) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """`[head][unit] -> clusters` and `[head][cluster] -> chunks`, clusters by where they lie."""
    tree = index.tree
    units = [spans(offsets, range(10**6)) for offsets in tree.unit_offsets[row].tolist()]
    members = tree.members[row].tolist()
    clusters = [spans(offsets, members[head]) for head, offsets in enumerate(tree.offsets[row].tolist())]
    return units, clusters


def spans(offsets: list[int], content: Sequence[int]) -> list[list[int]]:
    return [list(content[start:stop]) for start, stop in pairwise(offsets)]


def expect_bounds(index: ClusterIndex, keys: Tensor) -> None:
    """q·v <= q·mu + |q| r for chunk keys `[H, C, d]` below a cluster, and below a unit.

    The worst query points from the centroid to the key, so it is among those tried. All numbers are read as float64;
    the tolerance is that arithmetic's: 20 roundings of numbers below 4, against radii inflated by 2**-23.
    """
    tree = index.tree
    units, clusters = nodes(index)
    all_chunks = set(range(keys.shape[1]))
    for head in range(keys.shape[0]):
        assert sorted(chunk for cluster in clusters[head] for chunk in cluster) == sorted(all_chunks)
        below_unit = []
        for unit in units[head]:
            chunks = [chunk for cluster in unit for chunk in clusters[head][cluster]]
            below_unit.append(keys[head, chunks])
        below_cluster = [keys[head, chunks] for chunks in clusters[head]]
        for centroids, radii, below in (
            (tree.unit_centroids, tree.unit_radii, below_unit),
            (tree.centroids, tree.radii, below_cluster),
        ):
            for number, vectors in enumerate(below):
                center, covered = centroids[0, head, number].double(), float(radii[0, head, number])
                worst = vectors.double() - center
                for queries in (worst, torch.randn(4, keys.shape[2], dtype=torch.float64)):
                    bound = queries @ center + queries.norm(dim=1) * covered
                    assert (queries @ vectors.double().T <= bound[:, None] + 1e-14).all()


def test_bounds_hold_after_the_build() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        cache = Cache.random(400, dtype=dtype)
        index = indexed(SMALL, cache, TokenHistory(), [400])
        keys = chunk_keys(cache.view(400), 0, index.rows[0].edges)
        assert index.rows[0].chunks == keys.shape[1] > 50
        expect_bounds(index, keys)


def test_bounds_hold_after_thousands_of_updates() -> None:
    selector, updates = replace(SMALL, chunk_min=2, chunk_max=3), 5000
    length = 200 + 3 * updates
    cache = Cache.random(length)
    lengths = [200, 260, 261, 2000, *range(2010, 2300, 7), length]
    index = indexed(selector, cache, text(np.random.default_rng(0), [length]), lengths)
    held = index.rows[0]
    assert held.chunks - held.planted >= updates
    keys = chunk_keys(cache.view(length), 0, held.edges)
    units, clusters = nodes(index)
    tree = index.tree
    for head in range(2):
        sizes = [stop - start for start, stop in pairwise(held.edges)]
        tokens = [sum(sizes[chunk] for cluster in unit for chunk in clusters[head][cluster]) for unit in units[head]]
        assert tree.unit_tokens[0, head].tolist() == tokens
        assert all(cluster == sorted(cluster) for cluster in clusters[head])
        grown = held.chunks - held.planted
        assert int(tree.unit_weights[0, head].sum()) == held.clusters + grown
    expect_bounds(index, keys)


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 4))
def test_the_literal_lazy_update(seed: int, size: int) -> None:
    """One new chunk as the lazy update takes it in (algorithm 1), in float64 from what was stored before it."""
    torch.manual_seed(seed)
    selector = replace(SMALL, cluster_size=size)
    cache = Cache.random(200, dtype=torch.float32)
    index = indexed(selector, cache, TokenHistory(), [150])
    before, count = copy.deepcopy(index), index.rows[0].chunks
    length = 151
    while index.rows[0].chunks == count:
        update(index, cache.view(length), 1)
        length += 1
    fresh = index.rows[0].edges[count:]
    keys = chunk_keys(cache.view(length), 0, fresh).double()
    members = copy.deepcopy(before.tree.members[:, :, :count])
    tree = replace(before.tree, members=members)
    units, clusters = nodes(replace(before, tree=tree))
    for head in range(2):
        center = tree.centroids[0, head].double()
        spread = tree.radii[0, head].double()
        weights = [len(chunks) for chunks in clusters[head]]
        unit_center, unit_spread = tree.unit_centroids[0, head].double(), tree.unit_radii[0, head].double()
        unit_weights = [len(children) for children in units[head]]
        for key in keys[head]:
            near = int((center @ key).argmax())
            unit = next(number for number, children in enumerate(units[head]) if near in children)
            new = normalised(center[near] * weights[near] + key)
            spread[near] = max(spread[near] + (new - center[near]).norm(), (key - new).norm())
            center[near] = new
            weights[near] += 1
            unit_new = normalised(unit_center[unit] * unit_weights[unit] + key)
            step = (unit_new - unit_center[unit]).norm()
            unit_spread[unit] = max(unit_spread[unit] + step, (key - unit_new).norm())
            unit_center[unit] = unit_new
            unit_weights[unit] += 1
        # A centroid is rounded to float32 at every update, each radius with it: a few units of 1 per chunk.
        tolerance = 20 * len(keys[head]) * 2.0**-24
        got = index.tree
        assert (got.centroids[0, head].double() - center).abs().max() <= tolerance
        assert (got.radii[0, head].double() - spread).abs().max() <= tolerance
        assert (got.unit_centroids[0, head].double() - unit_center).abs().max() <= tolerance
        assert (got.unit_radii[0, head].double() - unit_spread).abs().max() <= tolerance
        assert got.unit_weights[0, head].tolist() == unit_weights
        assert got.offsets[0, head].diff().tolist() == weights


def normalised(vector: Tensor) -> Tensor:
    return vector / vector.norm()


@pytest.mark.parametrize("options", [{}, {"k_g": 64}, {"coarse": "cap64", "k_g": 64}])
def test_a_wide_search_reaches_every_chunk(options: dict[str, object]) -> None:
    """With room for all but a few tokens the set holds all but a chunk or two: none is out of reach."""
    selector = ClusterSelector(budget=990, sinks=3, buffer=12, chunk_min=3, chunk_max=6, **options)
    cache = Cache.random(1000)
    index = indexed(selector, cache, text(np.random.default_rng(1), [1000]), [1000])
    reached: set[int] = set()
    for _ in range(60):
        found = index.search(torch.randn(1, 4, 8), cache.view(1000))
        for head in range(2):
            count = int(found.counts[0, head])
            assert 990 - 6 < count <= 990
            reached.update(found.ids[0, head, :count].tolist())
    assert reached == set(range(1000))


def test_growth_follows_the_buffer() -> None:
    """Token by token: no chunk before the buffer is full, chunks of legal size after, the rest in the buffer."""
    cache, history = Cache.random(300), text(np.random.default_rng(2), [300])
    index = SMALL.new_index(cache.view(30), history)
    for length in range(30, 300):
        before = list(index.rows[0].edges)
        update(index, cache.view(length), 1 if length > 30 else 30)
        held = index.rows[0]
        if length <= 40:
            assert held.chunks == 0
            continue
        assert held.edges[0] == 3
        assert length - 1 - held.end < 12
        assert all(3 <= stop - start <= 6 for start, stop in pairwise(held.edges))
        if before:
            assert list(held.edges[: len(before)]) == before
            assert (len(held.edges) > len(before)) == (length - 1 - before[-1] >= 12)
        found = index.search(torch.randn(1, 4, 8), cache.view(length))
        for head in range(2):
            tokens = found.ids[0, head, : int(found.counts[0, head])].tolist()
            assert {*range(3), *range(held.end, length)} <= set(tokens)
            assert 40 - 6 < len(tokens) <= 40 or held.chunks * 6 < 40


def test_polluted_tokens_stay_in_the_buffer() -> None:
    selector = replace(SMALL, buffer=16, every=8)
    cache, history = Cache.random(300), text(np.random.default_rng(3), [300])
    history.clean = 60
    index = selector.new_index(cache.view(61), history)
    for length in range(61, 300):
        if (length - 60) % 8 == 0:  # the dense pass of a rectification
            history.clean = length
        update(index, cache.view(length), length if length == 61 else 1)
        held = index.rows[0]
        assert held.end <= history.clean
        assert length - 1 - held.end < 16
    assert held.chunks - held.planted > 20
    frozen = held.end
    history.clean = frozen
    update(index, cache.view(300), 1)
    assert held.end == frozen


def same(one: ClusterIndex, other: ClusterIndex, row: int = 0, other_row: int = 0) -> None:
    mine, yours = one._own(row).tensors(), other._own(other_row).tensors()
    assert list(one.rows[row].edges) == list(other.rows[other_row].edges)
    for name, tensor in mine.items():
        assert tensor.equal(yours[name]), name


@pytest.mark.parametrize("kept", [152, 170, 230, 270, 310, 330, 339])
def test_taking_back_is_a_rebuild_and_a_replay(kept: int) -> None:
    cache, history = Cache.random(400), text(np.random.default_rng(4), [400])
    index = indexed(SMALL, cache, history, [152, *range(153, 341)])
    held = index.rows[0]
    edges, planted = [edge for edge in held.edges if edge <= kept], held.planted
    # The tokens behind `kept` become others; what was taken back must leave no trace.
    cache = Cache(torch.cat((cache.keys[:, :kept], torch.randn(2, 400 - kept, 8).bfloat16()), dim=1))
    update(index, cache.view(kept + 1), 1)
    view = cache.view(400)
    # The latest chunks are taken back one by one, more of them by a rebuild.
    assert (held.chunks - len(edges) + 1 > UNDONE) == (kept < 200)
    tree = plant(chunk_keys(view, 0, edges[: planted + 1]), edges[: planted + 1], SMALL, torch.bfloat16)
    if len(edges) > planted + 1:
        rest = edges[planted:]
        lengths = [stop - start for start, stop in pairwise(rest)]
        members, _ = graft(tree, chunk_keys(view, 0, rest), lengths, planted)
    else:
        members = tree.members[0]
    assert list(index.rows[0].edges) == edges
    assert index._own(0).members[0].equal(members)
    for name in (
        "centroids",
        "radii",
        "offsets",
        "numbers",
        "unit_centroids",
        "unit_radii",
        "unit_tokens",
        "unit_weights",
    ):
        assert getattr(index._own(0), name).equal(getattr(tree, name)), name
    for length in range(kept + 2, 401):
        update(index, cache.view(length), 1)
    expect_bounds(index, chunk_keys(view, 0, index.rows[0].edges))


def test_taking_back_behind_the_build_builds_anew() -> None:
    cache, history = Cache.random(300), text(np.random.default_rng(5), [300])
    index = indexed(SMALL, cache, history, range(152, 240))
    update(index, cache.view(31), 1)
    assert index.rows[0].chunks == 0
    assert index.search(torch.randn(1, 2, 8), cache.view(31)).counts.tolist() == [[31, 31]]
    for length in range(32, 100):
        update(index, cache.view(length), 1)
    same(index, indexed(SMALL, cache, history, range(30, 100)))
    update(index, cache.view(40), 1)  # into the build, the row no longer than the budget
    update(index, cache.view(90), 50)
    same(index, indexed(SMALL, cache, history, [90]))


def test_taking_back_what_is_in_no_chunk_changes_nothing() -> None:
    cache, history = Cache.random(300), text(np.random.default_rng(6), [300])
    index = indexed(SMALL, cache, history, [152, *range(153, 200)])
    before = copy.deepcopy(index)
    update(index, cache.view(max(index.rows[0].end, 151) + 1), 1)
    same(index, before)


LAYOUTS = st.sampled_from(("padded", "paged"))


@settings(max_examples=15)
@given(st.integers(0, 2**31), LAYOUTS, st.sampled_from((torch.float32, torch.bfloat16)))
def test_rows_of_a_batch_are_as_if_alone(seed: int, layout: str, dtype: torch.dtype) -> None:
    """Ragged rows, some at or under the budget, in NaN-poisoned caches: the same index and sets as one row alone."""
    rng = np.random.default_rng(seed)
    lengths = [int(length) for length in rng.choice([5, 38, 40, 41, 60, 150], 3)]
    batch = Batch.random(rng, lengths, layers=1, kv_heads=2, group=2)
    history = text(rng, lengths)
    index: ClusterIndex | None = None
    for step in range(int(rng.integers(1, 30))):
        batch.step()
        kv = batch.views(layout, dtype)[0]
        history.starts = kv.rows.row_start.tolist()
        index = index or SMALL.new_index(kv, history)
        update(index, kv, 1 if step else kv.rows.max_len)
    assert index is not None
    q = batch.queries(0, dtype)
    found = SMALL.select(q, kv, index, None, 1.0)
    for row, length in enumerate(batch.lengths):
        alone = Batch(rng, 1, 2, 2, 8, "spread", [batch.k[row]], [batch.v[row]], [batch.q[row]])
        first = lengths[row]
        single: ClusterIndex | None = None
        for now in range(first, length + 1):
            shown = replace_length(alone, now)
            view = shown.views("padded", dtype)[0]
            levels = Text(by_row=[history.by_row[row]], starts=view.rows.row_start.tolist())
            if single is None:
                single = SMALL.new_index(view, levels)
            single.history = levels
            update(single, view, 1 if now > first else now)
        assert single is not None
        if length > 40:
            same(index, single, row)
        one = SMALL.select(q[row : row + 1], view, single, None, 1.0)
        expect_same_sets(found, one, row)


def replace_length(batch: Batch, length: int) -> Batch:
    shown = copy.copy(batch)
    shown.k = [[layer[:, :length] for layer in row] for row in batch.k]
    shown.v = [[layer[:, :length] for layer in row] for row in batch.v]
    return shown


def expect_same_sets(found: Selection, one: Selection, row: int) -> None:
    assert found.counts[row].tolist() == one.counts[0].tolist()
    for head, count in enumerate(one.counts[0].tolist()):
        assert found.ids[row, head, :count].tolist() == one.ids[0, head, :count].tolist()
        assert (found.ids[row, head, count:] == -1).all()


def test_rows_can_be_permuted_and_then_go_their_own_ways() -> None:
    rng = np.random.default_rng(8)
    batch = Batch.random(rng, [60, 150, 30], layers=1, kv_heads=2, group=1)
    history = text(rng, [60, 150, 30])
    batch.step()
    kv = batch.views("padded", torch.float32)[0]
    history.starts = kv.rows.row_start.tolist()
    index = SMALL.new_index(kv, history)
    update(index, kv, kv.rows.max_len)
    for _ in range(20):
        order = rng.integers(0, 3, 3).tolist() if rng.random() < 0.3 else [0, 1, 2]
        index.permute(torch.tensor(order))
        batch.select(order)
        history.by_row = [history.by_row[row] for row in order]
        batch.step()
        kv = batch.views("padded", torch.float32)[0]
        history.starts = kv.rows.row_start.tolist()
        update(index, kv, 1)
    for row, held in enumerate(index.rows):
        if not held.edges:
            continue
        keys = chunk_keys(kv, row, held.edges)
        expect_bounds(replace(index, tree=index._own(row), rows=[held]), keys)


def test_narrowed_heads_share_memory_and_choose_alike() -> None:
    cache = Cache.random(200)
    index = indexed(SMALL, cache, TokenHistory(), [200])
    q = torch.randn(1, 4, 8)
    whole = index.search(q, cache.view(200))
    narrow = index.heads(1, 2)
    assert narrow.tree.centroids.data_ptr() == index.tree.centroids[:, 1:].data_ptr()
    assert index.heads(0, 2) is index
    found = narrow.search(q[:, 2:], cache.view(200).heads(1, 2))
    assert found.ids[:, 0].equal(whole.ids[:, 1])


def test_a_copy_is_independent() -> None:
    cache = Cache.random(300)
    index = indexed(SMALL, cache, TokenHistory(), [200])
    twin = copy.deepcopy(index)
    before = copy.deepcopy(twin)
    update(index, cache.view(299), 99)
    same(twin, before)
    update(twin, cache.view(299), 99)
    same(twin, index)


def test_bytes_are_those_of_the_tensors() -> None:
    index = indexed(SMALL, Cache.random(500), TokenHistory(), [500])
    centroids = index.tree.centroids.nbytes
    assert centroids == 2 * 2 * index.rows[0].clusters * 8
    assert centroids < index.nbytes < 8 * centroids
