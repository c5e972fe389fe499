"""The oracles themselves, on cases small enough to work out by hand."""

import copy
import math

import numpy as np

from . import oracles_composed
from .oracles_cluster import Clustered, HeadIndex, Margin, Settings, k_means

E = np.eye(8)


def test_empty_cluster_takes_the_farthest_chunk() -> None:
    """Centroids 0 and 1 start equal: everything goes to 0, and 1 takes the chunk farthest from it, the lower of two."""
    vectors = [E[0], E[0], E[0], E[0], E[2], E[2]]
    first = k_means(vectors, 3, Margin(exact_ties=True))  # from chunks 0, 2, 4
    # Iteration 1: chunks 0..3 at centroid 0, 4 and 5 at centroid 2; all at distance 0, so chunk 0 moves to cluster 1.
    # Every later iteration: centroids 0 and 1 are equal again, so the same happens.
    assert first[1] == [1, 0, 0, 0, 2, 2]
    assert k_means([E[0], E[0], E[1], E[2]], 2, Margin(exact_ties=True))[1] == [0, 0, 1, 0]


def test_cluster_sets_by_hand() -> None:
    """Sinks 0, chunks of two along axes 0..3, budget 4: room for one chunk beside the buffer and the current token."""
    sizes = {"budget": 4, "sinks": 0, "buffer": 2, "chunk_min": 2, "chunk_max": 2, "cluster_size": 1}
    layer = Clustered.new(Settings(**sizes, chunking="fixed", replant=None, exact_ties=True), 1)
    k = np.concatenate([np.repeat(E[:4], 2, axis=0), E[7:8]])[None]  # T = 9: chunks 0-1, 2-3, 4-5, 6-7, current 8
    assert layer.step(E[2][None], k, None) == [[4, 5, 8]]
    k = np.concatenate((k, E[6][None, None]), axis=1)  # 8 is in the buffer, 9 is current
    assert layer.step(E[1][None] + 0.5 * E[2], k, None) == [[2, 3, 8, 9]]
    k = np.concatenate((k, E[6][None, None]), axis=1)  # 8 and 9 would be two: a chunk; 10 is current
    index = layer.heads[0]
    assert layer.step(E[1][None], k, None) == [[2, 3, 10]]
    assert index is not None and index.end == 10
    # Its key (e7 + e6) / sqrt 2 is equally far from all four: the first cluster, (e0 + v) / |e0 + v| from then on.
    v = (E[7] + E[6]) / math.sqrt(2)
    assert np.allclose(index.clusters[0].centroid, (E[0] + v) / math.sqrt(2))
    assert math.isclose(index.clusters[0].radius, np.linalg.norm((E[0] + v) / math.sqrt(2) - E[0]))
    assert index.clusters[0].children == [0, 4]
    # Taken back to 10 tokens it stays; to fewer than were looked at, all that is left is planted together.
    for kept, end, built in ((10, 10, 4), (9, 8, 4), (7, 6, 3)):
        other = copy.deepcopy(layer)
        other.crop(kept)
        other.step(E[1][None], k[:, : kept + 1], None)
        held = other.heads[0]
        assert held is not None and (held.end, held.built) == (end, built)
        assert (held.clusters[0].radius > 0) == (kept == 10)


def test_groups_are_planted_apart() -> None:
    """Chunks 0 to 3 in groups of two: equal keys of different groups are in different clusters."""
    sizes = {"budget": 4, "sinks": 0, "buffer": 2, "chunk_min": 2, "chunk_max": 2, "cluster_size": 2}
    layer = Clustered.new(Settings(**sizes, chunking="fixed", replant=2, exact_ties=True), 1)
    k = np.concatenate([np.repeat(E[[0, 0, 0, 1]], 2, axis=0), E[7:8]])[None]
    layer.step(E[0][None], k, None)
    index = layer.heads[0]
    assert index is not None and [node.children for node in index.clusters] == [[0, 1], [2, 3]]
    assert [unit.children for unit in index.units] == [[0], [1]]
    assert index.clusters[0].radius == 0 and index.clusters[1].radius > 0.7
    # Of the cluster that does not fit whole, the latest.
    assert layer.step(E[1][None], k, None) == [[6, 7, 8]]


def test_roles_by_hand() -> None:
    rng = np.random.default_rng(0)
    q, k = [rng.normal(size=(4, 8)) for _ in range(4)], [rng.normal(size=(2, 20, 8)) for _ in range(4)]
    roles = [["publish", "publish"], ["reuse", "dense"], ["select", "publish"], ["reuse", "reuse"]]
    got = oracles_composed.composed(q, k, roles=roles, rule=oracles_composed.top_k(5), pooling="mean").sets
    everything = list(range(20))

    def chosen(layer: int, head: int) -> list[int]:
        mean = (q[layer][2 * head] + q[layer][2 * head + 1]) / 2
        scores = (k[layer][head] @ mean).tolist()
        return sorted([19, *sorted(range(19), key=lambda t: -scores[t])[:4]])

    assert got[0] == [everything] * 4
    assert got[1] == [chosen(0, 0), chosen(0, 0), everything, everything]
    assert got[2] == [chosen(2, 0), chosen(2, 0), everything, everything]
    assert got[3] == [chosen(2, 0), chosen(2, 0), chosen(2, 1), chosen(2, 1)]


def test_upper_bounds_hold_after_lazy_updates() -> None:
    rng = np.random.default_rng(1)
    settings = Settings(budget=30, sinks=1, buffer=6, chunk_min=2, chunk_max=5, replant=None)
    layer, levels = Clustered.new(settings, 1), rng.integers(0, 5, 120).tolist()
    k = rng.normal(size=(1, 120, 8))
    for length in range(50, 120):
        layer.step(rng.normal(size=(2, 8)), k[:, :length], levels)
    index = layer.heads[0]
    assert isinstance(index, HeadIndex) and len(index.keys) > index.built
    for unit in index.units:
        for c in unit.children:
            node = index.clusters[c]
            for v in (index.keys[i] for i in node.children):
                assert np.linalg.norm(v - node.centroid) <= node.radius + 1e-12
                assert np.linalg.norm(v - unit.centroid) <= unit.radius + 1e-12
    assert sorted(i for node in index.clusters for i in node.children) == list(range(len(index.keys)))
