"""Clusters of tokens and of chunks ranked by attention mass, against loops in float64 over the same clusters."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import saccade
from saccade.selection.clusters.mass_index import MassIndex
from saccade.selection.index import KeySizes, Views
from saccade.text.history import TokenHistory
from saccade.types import Intake, KVView, ModelShape, Rows

SHAPE = ModelShape(layers=4, query_heads=6, kv_heads=2, head_dim=16)
LAYERS, SCALE = (2, 3), 0.3
LENGTH = 900
LEVELS = [4, 4, 3, 2, 1, 0, 0, 0, 0, 0]
"""Delimiter levels of a vocabulary of ten: half of it delimits."""
TOKENS = "token_clusters:budget=96,group=256,buffer=16"
CHUNKS = "lychee_cluster:budget=96,buffer=16"


class Decoder:
    """One sequence of random keys whose index takes in as many clean tokens as it is told."""

    def __init__(self, spec: str, seed: int = 0, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.keys = torch.randn(len(LAYERS), length, 2, 16, generator=generator)
        # A few tokens are looked for.
        self.keys[:, ::37] *= 3
        self.ids = torch.randint(0, 10, (1, length), generator=generator)
        self.q = torch.randn(1, 6, 16, generator=generator)
        self.selector: Any = saccade.Policy.from_spec(spec).plan(SHAPE).selector
        text = TokenHistory(LEVELS)
        text.record(0, length, 1, self.ids, None)
        plan = saccade.Policy.from_spec(spec).plan(SHAPE)
        index = plan.new_slots(KeySizes.of(self.view(0, length)), 1, text=text)
        assert isinstance(index, MassIndex)
        self.index, self.known = index, 0

    def view(self, layer: int, length: int) -> KVView:
        held = self.keys[layer : layer + 1]
        return KVView(held, held, Rows.on_host(torch.zeros(1, 1, dtype=torch.int32), [0], [length]))

    def take_in(self, length: int) -> None:
        stop = self.selector.stop(length, length - 1)
        self.index.grow(1, stop)

        def seen(slots: Sequence[int]) -> dict[int, KVView]:
            return {layer: self.view(at, length).picked([*slots]) for at, layer in enumerate(LAYERS)}

        self.index.take_in([Intake(0, 0, self.known, stop)], Views(LAYERS, seen))
        self.known = stop

    def sets(self, length: int) -> list[list[int]]:
        """Of both KV heads in the second layer."""
        chosen = self.selector.select(self.q, self.view(1, length), self.index.layers[3], None, SCALE)
        return [row[:count].tolist() for row, count in zip(chosen.ids[0], chosen.counts[0], strict=True)]


def logit(q: np.ndarray, keys: np.ndarray, spread: float) -> np.ndarray:
    """Of each query head, float64."""
    mean = keys.mean(0)
    far = math.sqrt(((keys - mean) ** 2).sum(1).mean())
    return SCALE * (q @ mean + spread * np.sqrt((q**2).sum(1)) * far / math.sqrt(q.shape[1])) + math.log(len(keys))


def filled(ranked: Sequence[Sequence[int]], always: set[int], budget: int) -> list[int]:
    chosen = set(always)
    for tokens in ranked:
        chosen |= set(sorted(tokens)[: budget - len(chosen)])
    return sorted(chosen)


def expected(decoder: Decoder, length: int, head: int, each: int | None = None) -> list[int]:
    """The set of a KV head, or of one of its query heads, over the clusters or chunks that the index has made."""
    tree, budget, settings = decoder.index.layers[3].tree, decoder.selector.budget, decoder.selector
    keys = decoder.keys[1, :, head].double().numpy()
    asked = decoder.q[0, 3 * head : 3 * head + 3].double().numpy()
    end, labels = int(tree.ends[0]), tree.labels[0, head].tolist()
    sets: dict[int, list[int]] = {}
    for position in range(settings.sinks, end):
        sets.setdefault(position // tree.tokens * tree.sets + labels[position], []).append(position)
    numbers = sorted(sets)
    logits = np.stack([logit(asked, keys[sets[number]], settings.spread) for number in numbers], 1)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    scores = shares[slice(None) if each is None else slice(each, each + 1)].sum(0)
    order = [numbers[place] for place in np.argsort(-scores, kind="stable")]
    return filled([sets[number] for number in order], {*range(settings.sinks), *range(end, length)}, budget)


@pytest.mark.parametrize("spec", [f"{TOKENS},cluster_size=16,spread=0", CHUNKS, f"{CHUNKS},chunking=fixed"])
def test_sets_are_those_of_loops_in_float64(spec: str) -> None:
    for length in (97, 300, 899):
        decoder = Decoder(spec)
        decoder.take_in(length)
        assert decoder.sets(length) == [expected(decoder, length, head) for head in range(2)]
        assert all(len(tokens) == 96 for tokens in decoder.sets(length)), "a budget is filled"


def test_a_set_of_each_query_head() -> None:
    decoder = Decoder(f"{TOKENS},heads=query")
    decoder.take_in(899)
    assert decoder.sets(899) == [expected(decoder, 899, head, each) for head in range(2) for each in range(3)]


def test_clusters_hold_every_token_once_and_are_of_the_wanted_number() -> None:
    decoder = Decoder(TOKENS)
    decoder.take_in(899)
    tree = decoder.index.layers[3].tree
    assert int(tree.ends[0]) == 896 and tree.sizes[0].sum(1).tolist() == [896 - 16] * 2
    # Blocks of 256, 256, 256 and 128 tokens; 16 sinks are in none.
    assert [int((row > 0).sum()) for row in tree.sizes[0]] == [(256 - 16) // 8 + 32 + 32 + 16] * 2


def test_chunks_are_those_of_the_text() -> None:
    """The strongest delimiter of a window of 8 to 16 tokens ends a chunk, among equals the latest."""
    decoder = Decoder(CHUNKS)
    decoder.take_in(899)
    tree, levels = decoder.index.layers[3].tree, [LEVELS[token] or 6 for token in decoder.ids[0].tolist()]
    edges = [16]
    while edges[-1] + 16 <= 896:
        start = edges[-1]
        edges.append(start + min(range(8, 17), key=lambda size: (levels[start + size - 1], -size)))
    owners = [number for number, (start, stop) in enumerate(pairwise(edges)) for _ in range(start, stop)]
    assert int(tree.ends[0]) == edges[-1] and int(tree.used[0]) == len(edges) - 1
    assert tree.labels[0, :, 16 : edges[-1]].tolist() == [owners] * 2
    assert tree.sizes[0, :, : len(edges) - 1].tolist() == [[stop - start for start, stop in pairwise(edges)]] * 2


@pytest.mark.parametrize("spec", [TOKENS, CHUNKS])
def test_how_the_tokens_came_changes_nothing(spec: str) -> None:
    whole, parts = Decoder(spec), Decoder(spec)
    whole.take_in(899)
    for length in (97, 98, 300, *range(400, 899, 7), 899):
        parts.take_in(length)
    assert parts.sets(899) == whole.sets(899)
    one, other = (decoder.index.layers[3].tree for decoder in (whole, parts))
    used = int(one.used[0])
    assert used == int(other.used[0])
    held = one.sizes[:, :, :used] > 0
    for name in ("means", "spreads", "sizes"):
        assert torch.equal(*(getattr(tree, name)[:, :, :used][held] for tree in (one, other))), name


@pytest.mark.parametrize("spec", ["token_clusters:budget=512", "lychee_cluster:budget=512"])
def test_an_index_that_has_grown_by_8000_tokens_is_one_planted_at_once(spec: str) -> None:
    """Its sets are the same at every thousandth token; it is looked at every 25 tokens, a fifth of a buffer."""
    grown = Decoder(spec, length=12_000)
    for length in range(3999, 12_000, 25):
        grown.take_in(length)
        if length % 1000 == 999:
            whole = Decoder(spec, length=12_000)
            whole.take_in(length)
            assert grown.sets(length) == whole.sets(length)


@pytest.mark.parametrize("spec", [TOKENS, CHUNKS])
def test_what_was_taken_back_leaves_no_trace(spec: str) -> None:
    decoder, fresh = Decoder(spec), Decoder(spec)
    decoder.take_in(899)
    decoder.index.clear(0)
    decoder.known = 0
    for one in (decoder, fresh):
        one.take_in(410)
    assert decoder.sets(410) == fresh.sets(410)


def test_sequences_in_slots_know_nothing_of_each_other() -> None:
    """Two sequences in slots 2 and 0 of three, rows in another order, one longer than the other; then moved."""
    alone = [Decoder(TOKENS, seed) for seed in (1, 2)]
    lengths, slots = (899, 333), (2, 0)
    for decoder, length in zip(alone, lengths, strict=True):
        decoder.take_in(length)
    keys = torch.cat([decoder.keys[1:] for decoder in alone])
    selector: Any = alone[0].selector
    plan = saccade.Policy.from_spec(TOKENS).plan(SHAPE)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    kv = KVView(keys, keys, Rows.on_host(table, [0, 0], [*lengths]))
    index = plan.new_slots(KeySizes.of(kv), 3, longest=LENGTH)
    assert isinstance(index, MassIndex)
    rows = {slot: row for row, slot in enumerate(slots)}
    stops = [selector.stop(length, length - 1) for length in lengths]
    new = [Intake(slot, 0, 0, stop) for slot, stop in zip(slots, stops, strict=True)]

    def seen(asked: Sequence[int]) -> dict[int, KVView]:
        return dict.fromkeys(LAYERS, kv.picked([rows[slot] for slot in asked]))

    index.take_in(new, Views(LAYERS, seen))
    for order in ([0, 1, 2], [2, 2, 0]):
        if order != [0, 1, 2]:
            index.permute(torch.tensor(order))
        at = torch.tensor([order.index(slot) for slot in slots], dtype=torch.int32)
        index.place(at.tolist(), at)
        queries = torch.cat([decoder.q for decoder in alone])
        chosen = selector.select(queries, kv, index.layers[3], None, SCALE)
        for row, (decoder, length) in enumerate(zip(alone, lengths, strict=True)):
            assert chosen.ids[row].tolist() == decoder.sets(length)


def test_blocks_are_a_binary_counter_of_buffers() -> None:
    settings: Any = saccade.Policy.from_spec(TOKENS).plan(SHAPE).selector
    assert [*settings.blocks(0)] == []
    assert [*settings.blocks(256 + 128 + 16)] == [(0, 256), (256, 128), (384, 16)]
    # A full buffer carries: what it completes is made anew, and nothing else.
    assert settings.changed(256 + 112, 256 + 128) == [(256, 128)]
    assert settings.changed(256 + 128, 256 + 144) == [(384, 16)]
    made = [sum(size for _, size in settings.changed(stop, stop + 16)) for stop in range(0, 2560, 16)]
    # Half a token for every digit below the group's, and the group's own.
    assert sum(made) / 2560 == 4 / 2 + 1
    assert settings.upkeep(9999, 1, 0, 16, 4).read == 3 * 16 * 4


@pytest.mark.parametrize(
    "spec",
    ["lychee_cluster:budget=512,sinks=400,buffer=16", "lychee_cluster:budget=160,sinks=64,buffer=16,chunk_min=16"],
)
def test_more_sinks_than_chunks_have_room_for(spec: str) -> None:
    """Labels stand at positions, which the sinks are counted in."""
    decoder = Decoder(spec)
    decoder.take_in(530)
    assert decoder.sets(530) == [expected(decoder, 530, head) for head in range(2)]
