"""Methods that claims compare with, step by step against naive loops and float64 oracles."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import claims  # noqa: F401  # registers the method
import saccade
from benchmarks.growth import one_head, synthetic_keys
from claims.methods.lazy_clusters import LazyClusters, LazyTree
from lab.whole_tree import WholeTree
from methods.harness import Decoder, check_outputs
from methods.layouts import LEVELS, Batch
from methods.oracles import Array
from methods.oracles_cluster import Clustered, Settings, chunks_of
from methods.oracles_composed import Cut, always, by_roles, persistent, top_k
from oracles import raw_scores
from saccade.errors import PolicyError
from saccade.plans.plan import Plan, layer_roles
from saccade.text.history import TokenHistory
from saccade.types import ModelShape
from trees import beside
from walking import in_turn


def drawn_head(length: int, heads: int) -> int:
    """Which of a group's heads is heard by a row of so many tokens; the draw itself is ours."""
    mixed = length * 2654435761 % 2**32
    mixed = (mixed ^ mixed // 2**16) * 1540483477 % 2**32
    return mixed // 2**8 % heads


def test_every_head_is_drawn_as_often() -> None:
    counts = np.bincount([drawn_head(length, 3) for length in range(1, 3001)])
    # Six standard deviations of 3,000 draws.
    assert len(counts) == 3 and abs(counts - 1000).max() < 6 * (3000 * 2 / 9) ** 0.5


@pytest.mark.parametrize("roles", ["select", "layers:2+4"])
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 40),
    framed=st.booleans(),
)
@settings(max_examples=6, deadline=None)
def test_sets_of_a_random_head_are_those_of_one_head(
    roles: str, seed: int, lengths: list[int], kv_heads: int, group: int, budget: int, framed: bool
) -> None:
    batch = Batch.random(np.random.default_rng(seed), lengths, layers=6, kv_heads=kv_heads, group=group)
    shape = ModelShape(6, kv_heads * group, kv_heads, batch.dim)
    frame = {"sinks": budget // 3, "window": budget // 4} if framed else {}
    decoder = Decoder(saccade.policy("random_head", budget=budget, roles=roles, dense_layers=2, **frame).plan(shape))
    by_layer = always(6, kv_heads, 2) if roles == "select" else persistent(6, kv_heads, 2, [2, 4])

    def choose(layer: int, q: Any, k: Any) -> list[Cut]:
        length = k.shape[1]
        scores = raw_scores(q, k, "each")[drawn_head(length, group) :: group]
        return [top_k(budget, **frame)(row, length, 1) for row in scores for _ in range(group)]

    for _ in range(3):
        batch.step()
        sets, _ = decoder.step(batch, "paged", torch.float32)
        assert [
            [[sorted(chosen) for chosen in layer] for layer in by_roles(q, k, by_layer, choose).sets]
            for q, k in zip(batch.q, batch.k, strict=True)
        ] == sets


UNKNOWN = len(LEVELS)
"""A token that is not in the vocabulary."""


def chunk_sets(
    q: Array, k: Array, levels: Sequence[int | None], *, budget: int, shortest: int, longest: int
) -> list[list[int]]:
    """Quest's bounds over chunks of text, naive in float64, from Quest's score and our rulings: nothing is kept.

    Positions for every query head; q ``[Hq, d]``, k ``[Hkv, T, d]`` with the current token, which is in no chunk.

    Chunks are taken by their group's best score, ties to the lower position, until the next one does not fit beside the
    tokens that are in no chunk.
    """
    length, group = k.shape[1], q.shape[0] // k.shape[0]
    if length <= budget:
        return [list(range(length)) for _ in range(q.shape[0])]
    chunks = chunks_of(levels, 0, length - 1, shortest, longest)
    rest = list(range(chunks[-1][1] if chunks else 0, length))
    sets = []
    for h, keys in enumerate(k):
        bounds = [(keys[start:stop].min(axis=0), keys[start:stop].max(axis=0)) for start, stop in chunks]
        scores = [
            max(
                float(sum(max(x * a, x * b) for x, a, b in zip(p, *bound, strict=True))) for p in q[h * group :][:group]
            )
            for bound in bounds
        ]
        taken: list[int] = []
        for c in sorted(range(len(chunks)), key=lambda c: (-scores[c], c)):
            inside = range(*chunks[c])
            if len(rest) + len(taken) + len(inside) > budget:
                break
            taken += inside
        sets += [sorted(taken + rest)] * group
    return sets


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    shortest = draw(st.integers(1, 5))
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "lengths": draw(st.lists(st.integers(1, 30) | st.integers(30, 90), min_size=1, max_size=3)),
        "sizes": {"kv_heads": draw(st.integers(1, 2)), "group": draw(st.sampled_from([1, 2, 4]))},
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "shortest": shortest,
        "longest": draw(st.integers(shortest, 9)),
        "spare": draw(st.sampled_from([1, 2, 6, 12, 41])),
    }


@given(drawn=situations(), cut=st.integers(1, 20), data=st.data())
@settings(max_examples=12, deadline=None)
def test_sets_of_text_pages_are_those_of_the_oracle(drawn: dict[str, Any], cut: int, data: st.DataObject) -> None:
    """Over several new chunks; then tokens are taken back and others fed, and rows move."""
    sizes = {"shortest": drawn["shortest"], "longest": drawn["longest"]}
    budget = sizes["longest"] + drawn["spare"]
    batch = Batch.random(
        np.random.default_rng(drawn["seed"]), [n + 20 for n in drawn["lengths"]], layers=2, **drawn["sizes"]
    )
    for ids in batch.ids[1:]:
        ids[: len(ids) // 2 : 7] = [UNKNOWN] * len(ids[: len(ids) // 2 : 7])
    options = {"budget": budget, "chunk_min": sizes["shortest"], "chunk_max": sizes["longest"], "dense_layers": 1}
    shape = ModelShape(2, batch.kv_heads * batch.group, batch.kv_heads, batch.dim)
    decoder = Decoder(saccade.policy("text_pages", **options).plan(shape))

    def expected(row: int) -> list[list[list[int]]]:
        levels = [LEVELS[token] if token < UNKNOWN else None for token in batch.ids[row]]

        def choose(layer: int, q: Any, k: Any) -> list[Cut]:
            return [Cut(chosen) for chosen in chunk_sets(q, k, levels, budget=budget, **sizes)]

        return by_roles(batch.q[row], batch.k[row], always(2, batch.kv_heads, 1), choose).sets

    def steps(count: int) -> None:
        for _ in range(count):
            batch.step()
            sets, outputs = decoder.step(batch, "padded", drawn["dtype"])
            assert sets == [expected(row) for row in range(len(sets))]
            check_outputs(batch, sets, outputs, drawn["dtype"])

    steps(12)
    batch.crop(cut)
    decoder.begin(batch)
    steps(3)
    rows = [*data.draw(st.lists(st.integers(0, len(drawn["lengths"]) - 1), max_size=2))]
    rows.append(batch.lengths.index(max(batch.lengths)))  # buffers do not shrink when rows leave
    batch.select(rows)
    decoder.permute(rows)
    steps(6)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PolicyError, match="policy text_pages: chunk_min=8, chunk_max=20 and budget=20 do not ascend"):
        saccade.policy("text_pages", budget=20)


SIZES: dict[str, Any] = {"budget": 42, "sinks": 3, "buffer": 8, "chunk_min": 2, "chunk_max": 5}
ALL = 10**9
"""Chunks that an oracle plants together."""


class Trial:
    """A batch of random rows, decoded by the package and by the oracle; the second of two layers chooses."""

    def __init__(self, selector: Any, oracle: Settings, seed: int, lengths: list[int]) -> None:
        self.batch = Batch.random(np.random.default_rng(seed), lengths, layers=2, kv_heads=2, group=2, content="spread")
        self.decoder = Decoder(Plan(selector, layer_roles(ModelShape(2, 4, 2, self.batch.dim), 1)))
        self.rows = [Clustered.new(oracle, 2) for _ in lengths]
        self.near_tie = False

    def steps(self, count: int) -> None:
        batch = self.batch
        for _ in range(count):
            if self.near_tie:
                return
            batch.step()
            expected = [
                one.step(batch.q[row][1], batch.k[row][1], batch.levels(row)) for row, one in enumerate(self.rows)
            ]
            self.near_tie = min(one.margin.smallest for one in self.rows) < 1
            sets, _ = self.decoder.step(batch, "padded", torch.float32)
            assert self.near_tie or [row[1] for row in sets] == expected

    def crop(self, tokens: int) -> None:
        self.batch.crop(tokens)
        for length, oracle in zip(self.batch.lengths, self.rows, strict=True):
            oracle.crop(length)
        self.decoder.begin(self.batch)


def expect_few_ties(selector: Any, oracle: Settings) -> None:
    """Rows of any length, token by token, taken back and gone on with; most are compared to the end."""
    trials: list[Trial] = []

    @given(
        seed=st.integers(0, 2**32 - 1),
        lengths=st.lists(st.integers(1, 100), min_size=1, max_size=2),
        cut=st.integers(1, 25),
    )
    @settings(max_examples=6, deadline=None)
    def run(seed: int, lengths: list[int], cut: int) -> None:
        trial = Trial(selector, oracle, seed, [length + 20 for length in lengths])
        trial.steps(2 * SIZES["buffer"])
        if not trial.near_tie:
            trial.crop(cut)
        trial.steps(SIZES["buffer"] + 1)
        trials.append(trial)

    run()
    assert sum(trial.near_tie for trial in trials) <= 0.2 * len(trials) + 2


@pytest.mark.parametrize(("coarse", "k_g"), in_turn(["sqrt", "cap64"], [None, 2]))
def test_sets_of_a_whole_tree_are_those_of_the_oracle(coarse: Any, k_g: int | None) -> None:
    oracle = Settings(**SIZES, replant=ALL, coarse=coarse, k_g=k_g)
    expect_few_ties(WholeTree(**SIZES, coarse=coarse, k_g=k_g), oracle)


def test_later_chunks_join_the_nearest_cluster() -> None:
    expect_few_ties(LazyClusters(**SIZES), Settings(**SIZES, replant=None))


def test_a_new_prompt_is_planted_whole() -> None:
    keys, history = synthetic_keys(400, 16, seed=0), TokenHistory()
    indexes = beside(LazyClusters(**SIZES), history)

    def joined(length: int) -> int:
        """Chunks that the k-means has not seen, at this length."""
        index: Any = indexes.of(0, one_head(keys[:length]))
        assert isinstance(index.tree, LazyTree)
        return index.tree.chunks - index.tree.built

    assert joined(152) == 0 and [joined(length) for length in range(153, 240)][-1] > 10
    history.prompt = 300
    assert joined(301) == 0 < joined(340)


def test_coarse_units_and_other_options_are_the_papers() -> None:
    """The paper's grow with the root of the clusters; sqrt is the same up to 64."""
    counts = (1, 2, 5, 63, 64, 65, 4096, 4097, 50_000)
    units = {name: [WholeTree(coarse=name).units(count) for count in counts] for name in ("sqrt", "cap64", "root")}
    assert units["root"] == [1, 2, 3, 8, 8, 9, 64, 65, 224]
    assert units["sqrt"] == [min(count, 64) for count in units["root"]]
    assert units["cap64"] == [min(count, 64) for count in counts]
    selector = saccade.policy("whole_tree:coarse=cap64,k_g=3").plan(ModelShape(4, 4, 2, 8)).selector
    assert selector == WholeTree(coarse="cap64", k_g=3)
    assert replace(selector, k_g=None) == saccade.policy("whole_tree", coarse="cap64").options.selector
    with pytest.raises(PolicyError, match="policy whole_tree: coarse='64' is not valid"):
        saccade.policy("whole_tree", coarse="64")
