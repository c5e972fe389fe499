"""The paper's own index over many steps against its float64 oracle, as far as no decision is within float32's error."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from benchmarks.growth import one_head, synthetic_keys
from claims.methods.lazy_clusters import LazyClusters, LazyTree
from lab.whole_tree import WholeTree
from methods.harness import Decoder
from methods.layouts import Batch
from methods.oracles_cluster import Clustered, Settings
from saccade.errors import PolicyError
from saccade.plans.plan import Plan, layer_roles
from saccade.text.history import TokenHistory
from saccade.types import ModelShape
from trees import beside
from walking import in_turn

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
        lengths=st.lists(st.integers(1, 130), min_size=1, max_size=2),
        cut=st.integers(1, 25),
    )
    @settings(max_examples=8, deadline=None)
    def run(seed: int, lengths: list[int], cut: int) -> None:
        trial = Trial(selector, oracle, seed, [length + 20 for length in lengths])
        trial.steps(24)
        if not trial.near_tie:
            trial.crop(cut)
        trial.steps(12)
        trials.append(trial)

    run()
    assert sum(trial.near_tie for trial in trials) <= 0.2 * len(trials) + 2


@pytest.mark.parametrize(("coarse", "k_g"), in_turn(["sqrt", "cap64"], [None, 2]))
def test_sets_are_those_of_the_oracle(coarse: Any, k_g: int | None) -> None:
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

    assert joined(152) == 0
    assert [joined(length) for length in range(153, 240)][-1] > 10
    history.prompt = 300
    assert joined(301) == 0 < joined(340)


def test_coarse_units() -> None:
    """The paper's grow with the root of the clusters; sqrt is the same up to 64."""
    counts = (1, 2, 5, 63, 64, 65, 4096, 4097, 50_000)
    units = {name: [WholeTree(coarse=name).units(count) for count in counts] for name in ("sqrt", "cap64", "root")}
    assert units["root"] == [1, 2, 3, 8, 8, 9, 64, 65, 224]
    assert units["sqrt"] == [min(count, 64) for count in units["root"]]
    assert units["cap64"] == [min(count, 64) for count in counts]


def test_the_method_has_the_papers_options() -> None:
    selector = saccade.policy("whole_tree:coarse=cap64,k_g=3").plan(ModelShape(4, 4, 2, 8)).selector
    assert selector == WholeTree(coarse="cap64", k_g=3)
    assert replace(selector, k_g=None) == saccade.policy("whole_tree", coarse="cap64").options.selector
    with pytest.raises(PolicyError, match="policy whole_tree: coarse='64' is not valid"):
        saccade.policy("whole_tree", coarse="64")
