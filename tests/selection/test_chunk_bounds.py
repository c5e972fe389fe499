"""Quest's bounds over chunks of text, step by step against the float64 oracle: sets exactly, outputs in their budget.

Keys and queries lie on a grid, so that bounds and scores are exact and sets compare exactly, ties included.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from methods import oracles
from methods.harness import Decoder, check_outputs
from methods.layouts import LEVELS, Batch
from methods.oracles_chunks import Levels, Sizes, chunk_sets
from methods.oracles_composed import Cut, Roles, always, by_roles, persistent
from saccade.selection.chunks.bounds import ChunkBounds, ChunkSettings
from saccade.selection.history import ALL_CLEAN, TokenHistory
from saccade.selection.selector import NewTokens
from saccade.types import ModelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
UNKNOWN = len(LEVELS)
"""A token that is not in the vocabulary."""


@dataclass(frozen=True)
class Case:
    """Options of `composed` without the sizes, and what the oracle calls them."""

    options: dict[str, Any]
    heads: str = "kv"
    pooling: str = "max"
    reuse: bool = False

    @property
    def layers(self) -> int:
        return 4 if self.reuse else 2

    def roles(self, kv_heads: int) -> Roles:
        return persistent(4, kv_heads, 1, [1, 3]) if self.reuse else always(2, kv_heads, 1)


COMPOSED = {"scorer": "page_bounds", "chunking": "text", "dense_layers": 1}
CASES = {
    "kv": Case(COMPOSED),
    "query": Case({**COMPOSED, "heads": "query"}, heads="query"),
    "mean": Case({**COMPOSED, "pooling": "mean"}, pooling="mean"),
    "reuse": Case({**COMPOSED, "roles": "layers:1+3"}, reuse=True),
}


@st.composite
def chunk_sizes(draw: st.DrawFn) -> tuple[dict[str, int], Sizes]:
    """Options, and the sizes that follow from them."""
    page = draw(st.integers(1, 9))
    shortest, longest = max(page // 2, 1), page + page // 4
    options = {"page": page}
    if draw(st.booleans()):
        shortest = options["chunk_min"] = draw(st.integers(1, 5))
        longest = options["chunk_max"] = draw(st.integers(shortest, 9))
    return options, Sizes(shortest, longest, min(max(page, shortest), longest))


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "lengths": draw(st.lists(st.integers(1, 30) | st.integers(30, 90), min_size=1, max_size=3)),
        "kv_heads": draw(st.integers(1, 2)),
        "group": draw(st.sampled_from([1, 2, 4])),
        "content": draw(st.sampled_from(["spread", "clustered", "constant"])),
        "layout": draw(st.sampled_from(["padded", "paged"])),
        "dtype": draw(st.sampled_from(sorted(DTYPES))),
        "shortcut": draw(st.booleans()),
        "text": draw(st.sampled_from(["known", "known", "partly", "none"])),
        "sizes": draw(chunk_sizes()),
        "spare": draw(st.sampled_from([0, 1, 5, 11, 40])),
        "rectify": None,
    }


@dataclass
class Trial:
    """One batch decoded by the package and by the oracle."""

    case: Case
    situation: dict[str, Any]
    batch: Batch = field(init=False)
    decoder: Decoder = field(init=False)
    budget: int = field(init=False)

    def __post_init__(self) -> None:
        drawn = self.situation
        options, sizes = drawn["sizes"]
        self.budget = sizes.longest + (drawn["rectify"] or 1) + drawn["spare"]
        given = {**self.case.options, **options, "budget": self.budget, "rectify": drawn["rectify"]}
        rng = np.random.default_rng(drawn["seed"])
        shape = {key: drawn[key] for key in ("kv_heads", "group", "content")}
        self.batch = Batch.random(rng, drawn["lengths"], layers=self.case.layers, **shape)
        if drawn["text"] == "partly":
            for ids in self.batch.ids:
                ids[: len(ids) // 2 : 7] = [UNKNOWN] * len(ids[: len(ids) // 2 : 7])
        model = ModelShape(self.case.layers, drawn["kv_heads"] * drawn["group"], drawn["kv_heads"], self.batch.dim)
        plan = saccade.policy("composed", **given).plan(model)
        self.decoder = Decoder(plan, shortcut=drawn["shortcut"])

    def levels(self, row: int) -> Levels:
        known = self.situation["text"] != "none"
        return [LEVELS[token] if known and token < UNKNOWN else None for token in self.batch.ids[row]]

    def expected(self, row: int, clean: int) -> oracles.Sets:
        sizes, levels = self.situation["sizes"][1], self.levels(row)

        def choose(layer: int, q: oracles.Array, k: oracles.Array) -> list[Cut]:
            sharing = {"heads": self.case.heads, "pooling": self.case.pooling}
            return [Cut(s) for s in chunk_sets(q, k, levels, clean, budget=self.budget, sizes=sizes, **sharing)]

        batch = self.batch
        return by_roles(batch.q[row], batch.k[row], self.case.roles(batch.kv_heads), choose).sets

    def step(self, clean: list[int] | None = None) -> list[oracles.Sets]:
        """One decode step of all rows; `clean` is logical, None if nobody rectifies."""
        self.batch.step()
        lengths, drawn = self.batch.lengths, self.situation
        slot = None if clean is None else max(lengths) + 2 - lengths[0] + clean[0]
        dtype, text = DTYPES[drawn["dtype"]], drawn["text"] != "none"
        sets, outputs = self.decoder.step(self.batch, drawn["layout"], dtype, clean=slot, text=text)
        assert sets == [
            self.expected(row, length if clean is None else clean[row]) for row, length in enumerate(lengths)
        ]
        for length, row in zip(lengths, sets, strict=True):
            assert all(len(s) <= max(self.budget, 1) or len(s) == length for layer in row for s in layer)
        check_outputs(self.batch, sets, outputs, dtype)
        return sets


@pytest.mark.parametrize("case", CASES)
def test_steps_in_sequence_match_the_oracle(case: str) -> None:
    """Long enough for rows to outgrow their budget and for several chunks to be cut while decoding."""

    @given(situation=situations(), steps=st.integers(8, 20))
    @settings(max_examples=5, deadline=None)
    def run(situation: dict[str, Any], steps: int) -> None:
        trial = Trial(CASES[case], situation)
        for _ in range(steps):
            trial.step()

    run()


@given(situation=situations(), cuts=st.lists(st.integers(1, 20), min_size=2, max_size=2), data=st.data())
@settings(max_examples=6, deadline=None)
def test_index_survives_rewritten_tokens_and_moved_rows(
    situation: dict[str, Any], cuts: list[int], data: st.DataObject
) -> None:
    """Crop and decode other tokens, feed several tokens at once, reorder and repeat rows, go on with a deep copy."""
    lengths = [length + 20 for length in situation["lengths"]]
    trial = Trial(CASES["kv"], {**situation, "lengths": lengths, "layout": "padded"})
    for cut in cuts:
        for _ in range(4):
            trial.step()
        trial.batch.crop(cut)
        trial.decoder.begin(trial.batch)
        trial.step()
        trial.batch.extend(cut)
        trial.step()
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=2))
    rows.append(lengths.index(max(lengths)))  # buffers do not shrink when rows leave
    trial.batch.select(rows)
    trial.decoder.permute(rows)
    for _ in range(2):
        trial.step()
    trial.decoder.state = copy.deepcopy(trial.decoder.state)
    trial.decoder.state.observers = (trial.decoder.recorder,)
    for _ in range(8):
        trial.step()


@given(situation=situations(), every=st.integers(1, 9), rounds=st.integers(2, 5))
@settings(max_examples=6, deadline=None)
def test_only_clean_tokens_are_cut_under_rectification(situation: dict[str, Any], every: int, rounds: int) -> None:
    """After `every` sparse steps those tokens are rewritten together with a new one, and count as clean again."""
    trial = Trial(CASES["kv"], {**situation, "rectify": every, "layout": "padded"})
    for _ in range(rounds):
        clean = trial.batch.lengths  # all that is cached
        for _ in range(every):
            trial.step(clean)
        trial.batch.crop(every)
        trial.decoder.begin(trial.batch)
        trial.batch.extend(every + 1)


@given(situation=situations(), cut=st.integers(1, 20))
@settings(max_examples=6, deadline=None)
def test_chunks_do_not_depend_on_how_tokens_were_fed(situation: dict[str, Any], cut: int) -> None:
    """Built late, or grown token by token, or taken back and fed again: the same edges and the same bounds."""
    lengths = [length + 30 for length in situation["lengths"]]
    drawn = {**situation, "lengths": lengths, "layout": "padded", "shortcut": False}
    grown, late, again = (Trial(CASES["kv"], drawn) for _ in range(3))
    for _ in range(cut + 1):
        grown.step()
    for trial in (late, again):
        trial.batch = copy.deepcopy(grown.batch)
    dtype, text = DTYPES[drawn["dtype"]], drawn["text"] != "none"
    late.decoder.step(late.batch, "padded", dtype, text=text)
    whole = copy.deepcopy(again.batch)
    again.decoder.step(again.batch, "padded", dtype, text=text)
    again.batch.crop(cut)
    again.decoder.begin(again.batch)
    again.step()  # something else
    again.batch.crop(1)
    again.decoder.begin(again.batch)
    again.batch = whole
    again.decoder.step(again.batch, "padded", dtype, text=text)
    first, *others = (
        trial.decoder.state.indexes.of(1, trial.batch.views("padded", dtype)[1]) for trial in (grown, late, again)
    )
    assert isinstance(first, ChunkBounds)
    for other in others:
        assert isinstance(other, ChunkBounds)
        assert other.table.counts.equal(first.table.counts)
        for row, count in enumerate(first.table.counts.tolist()):
            assert other.table.edges[row, : count + 1].equal(first.table.edges[row, : count + 1])
            assert other.bounds.lower[row, :, :count].equal(first.bounds.lower[row, :, :count])
            assert other.bounds.upper[row, :, :count].equal(first.bounds.upper[row, :, :count])


@given(situation=situations())
@settings(max_examples=6, deadline=None)
def test_a_row_alone_is_the_row_in_its_batch(situation: dict[str, Any]) -> None:
    """Neighbours, padding, storage pages and the dense shortcut do not reach a row's sets."""
    trial = Trial(CASES["kv"], situation)
    other = "paged" if situation["layout"] == "padded" else "padded"
    alone = [
        Trial(CASES["kv"], {**situation, "lengths": [n], "layout": other, "shortcut": not situation["shortcut"]})
        for n in situation["lengths"]
    ]
    dtype, text = DTYPES[situation["dtype"]], situation["text"] != "none"
    for _ in range(6):
        sets, batch = trial.step(), trial.batch
        for row, single in enumerate(alone):
            lonely, part = single.batch, slice(row, row + 1)
            lonely.k, lonely.v, lonely.q, lonely.ids = batch.k[part], batch.v[part], batch.q[part], batch.ids[part]
            assert single.decoder.step(lonely, other, dtype, text=text)[0] == sets[part]


def test_chunks_have_the_sizes_of_the_options() -> None:
    """Quest's page of 16 gives chunks of 8 to 20 tokens, or of 16 where nobody knows the text."""
    rng = np.random.default_rng(0)
    batch = Batch.random(rng, [400], layers=1, kv_heads=1, group=1)
    batch.step()
    view = batch.views("padded", torch.float32)[0]
    start = view.rows.row_start

    def lengths(levels: tuple[int, ...] | None) -> set[int]:
        history = TokenHistory(levels)
        ids, positions = batch.by_slot(start.tolist())
        history.record(0, ids.shape[1], 1, ids, positions)
        assert history.clean == ALL_CLEAN
        given = ChunkSettings(budget=64)
        index = ChunkBounds.empty(given, history.chunks(given.cuts, view, text=True), history, view)
        before = index.nbytes
        index.update(view, NewTokens(view.rows, 400))
        assert index.nbytes > before
        edges = index.table.edges[0, : int(index.table.counts[0]) + 1].tolist()
        assert edges[0] == 0 and 400 - 1 - edges[-1] < 20
        return {stop - start for start, stop in pairwise(edges)}

    cut = lengths(LEVELS)
    assert min(cut) >= 8 and max(cut) <= 20 and len(cut) > 3
    assert lengths((0,) * len(LEVELS)) == {20}
    assert lengths((4,) * len(LEVELS)) == {20}
    assert lengths(None) == {16}
