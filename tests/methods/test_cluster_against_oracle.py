"""LycheeCluster over many steps against its float64 oracle, across the boundaries of chunks, buffer and budget.

The index holds means and norms, so its decisions are not exact: a sequence is compared as far as no decision lies
within float32's error of a tie, and few may end early. In bfloat16 the oracle rounds the stored centroids as the cache
does; an element within float32's error of the middle between two bfloat16 numbers counts as a near-tie as well.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.methods._roles import roles_of
from saccade.plans.plan import Plan, layer_roles
from saccade.selection.clusters.selector import ClusterSelector
from saccade.types import ModelShape

from . import oracles
from .harness import Decoder, check_outputs
from .layouts import Batch
from .oracles_cluster import Clustered, Settings, default_buffer
from .oracles_composed import Cut, Roles, always, by_roles, persistent

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Small constants, so that a few dozen tokens fill many buffers; budgets from the smallest legal one up."""
    shortest = draw(st.integers(2, 4))
    longest = draw(st.integers(max(4, shortest), 8))
    sinks, buffer = draw(st.integers(0, 4)), draw(st.integers(1, 12))
    return {
        "budget": sinks + buffer + 2 * longest - 1 + draw(st.sampled_from([0, 1, 5, 11, 24])),
        "sinks": sinks,
        "buffer": draw(st.sampled_from([buffer, buffer, None])),
        "chunk_min": shortest,
        "chunk_max": longest,
        "chunking": draw(st.sampled_from(["text", "text", "fixed"])),
        "pooling": draw(st.sampled_from(["mean", "mean", "max"])),
        "cluster_size": draw(st.integers(1, 4)),
        "replant": draw(st.sampled_from([1, 3, 8, 128])),
    }


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "lengths": draw(st.lists(st.integers(1, 40) | st.integers(60, 100), min_size=1, max_size=2)),
        "kv_heads": draw(st.integers(1, 2)),
        "group": draw(st.sampled_from([1, 2, 4, 8])),
        "layout": draw(st.sampled_from(["padded", "paged"])),
        "shortcut": draw(st.booleans()),
        "text": draw(st.sampled_from([True, True, True, False])),
        "options": draw(options()),
    }


def settings_of(given: dict[str, Any], dtype: str, *, exact_ties: bool = False) -> Settings:
    """The oracle's settings for the policy's options."""
    known = {entry.name for entry in fields(Settings)}
    values = {"sinks": 16, "chunk_max": 16, **{key: value for key, value in given.items() if key in known}}
    if values.get("buffer") is None:
        every = given.get("rectify") or 0
        values["buffer"] = default_buffer(values["budget"], values["sinks"], values["chunk_max"], every)
    return Settings(**values, bfloat16=dtype == "bfloat16", exact_ties=exact_ties)


def plan_of(given: dict[str, Any], shape: ModelShape, publishing: bool) -> Plan:
    """Behind one dense layer, others search an index of these settings; or two publish, and those behind them reuse."""
    settings = {name: value for name, value in given.items() if name != "rectify"}
    selector = ClusterSelector(**settings, every=given.get("rectify") or 0)
    return Plan(selector, *(roles_of("layers:1+3", shape, 1) if publishing else (layer_roles(shape, 1),)))


@dataclass
class Trial:
    """One batch decoded by the package and by the oracle, row by row."""

    situation: dict[str, Any]
    dtype: str = "float32"
    content: str = "spread"
    publishing: bool = False
    roles: Roles = field(init=False)
    batch: Batch = field(init=False)
    decoder: Decoder = field(init=False)
    rows: list[list[Clustered]] = field(init=False)
    near_tie: bool = False
    steps: int = 0

    def __post_init__(self) -> None:
        drawn = self.situation
        rng = np.random.default_rng(drawn["seed"])
        sizes = {key: drawn[key] for key in ("kv_heads", "group")}
        options, kv_heads = drawn["options"], drawn["kv_heads"]
        self.roles = persistent(5, kv_heads, 1, [1, 3]) if self.publishing else always(2, kv_heads, 1)
        layers = len(self.roles)
        self.batch = Batch.random(rng, drawn["lengths"], layers=layers, content=self.content, **sizes)
        shape = ModelShape(layers, kv_heads * drawn["group"], kv_heads, self.batch.dim)
        self.decoder = Decoder(plan_of(options, shape, self.publishing), shortcut=drawn["shortcut"])
        given = settings_of(options, self.dtype, exact_ties=self.content == "crossed")
        self.rows = [[Clustered.new(given, kv_heads) for _ in range(layers)] for _ in drawn["lengths"]]

    def expected(self, row: int, clean: int | None) -> oracles.Sets:
        """What the oracle says of a row; `clean` is logical."""
        levels = self.batch.levels(row) if self.situation["text"] else None

        def choose(layer: int, q: oracles.Array, k: oracles.Array) -> list[Cut]:
            return [Cut(tokens) for tokens in self.rows[row][layer].step(q, k, levels, clean)]

        return by_roles(self.batch.q[row], self.batch.k[row], self.roles, choose).sets

    def step(self, *, outputs: bool = False, clean: list[int] | None = None) -> None:
        """One decode step of all rows; nothing any more once a decision was too close to compare."""
        if self.near_tie:
            return
        self.batch.step()
        expected = [self.expected(row, None if clean is None else clean[row]) for row in range(len(self.batch.lengths))]
        self.near_tie = min(layer.margin.smallest for row in self.rows for layer in row) < 1
        if self.near_tie:
            return
        slot = None if clean is None else max(self.batch.lengths) + 2 - self.batch.lengths[0] + clean[0]
        dtype, text = DTYPES[self.dtype], self.situation["text"]
        sets, out = self.decoder.step(self.batch, self.situation["layout"], dtype, clean=slot, text=text)
        self.steps += 1
        assert sets == expected
        budget = self.situation["options"]["budget"]
        for row, length in zip(sets, self.batch.lengths, strict=True):
            for of_layer, names in zip(row, self.roles, strict=True):
                sparse = {"select", "reuse"} >= set(names)
                assert all(s[-1] == length - 1 and len(s) <= (budget if sparse else length) for s in of_layer)
        if outputs:
            check_outputs(self.batch, sets, out, dtype)

    def crop(self, tokens: int) -> None:
        self.batch.crop(tokens)
        for length, layers in zip(self.batch.lengths, self.rows, strict=True):
            for oracle in layers:
                oracle.crop(length)
        self.decoder.begin(self.batch, self.situation["layout"])

    def select(self, rows: list[int]) -> None:
        self.batch.select(rows)
        self.rows = [copy.deepcopy(self.rows[row]) for row in rows]
        self.decoder.permute(rows)


def expect_few_ties(trial: Callable[..., Trial], drawn: dict[str, Any], examples: int = 6, share: float = 0.2) -> None:
    """At most this share of the drawn sequences end early, and two for chance; 2 % do in float32."""
    trials: list[Trial] = []

    @given(**drawn)
    @settings(max_examples=examples, deadline=None)
    def run(**values: Any) -> None:
        trials.append(trial(**values))

    run()
    assert sum(trial.near_tie for trial in trials) <= share * len(trials) + 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_in_sequence_match_the_oracle(dtype: str) -> None:
    def run(situation: dict[str, Any], steps: int, content: str) -> Trial:
        if dtype == "bfloat16":  # one index only: every element of every centroid can lie between two numbers
            situation = {**situation, "lengths": situation["lengths"][:1], "kv_heads": 1}
        else:
            content = "spread"
        trial = Trial(situation, dtype, content)
        for step in range(steps):
            trial.step(outputs=step % 8 == 0)
        return trial

    drawn = {"steps": st.integers(25, 40), "content": st.sampled_from(["spread", "similar"])}
    # Of a bfloat16 index 14 % end early, and 33 % where keys are similar.
    expect_few_ties(run, {"situation": situations(), **drawn}, 6, 0.5 if dtype == "bfloat16" else 0.2)


def test_index_survives_rewritten_tokens_and_moved_rows() -> None:
    """Crop into the buffer, into lazily added chunks and into the build; then reorder and repeat rows."""

    def run(situation: dict[str, Any], cuts: list[int], data: st.DataObject) -> Trial:
        lengths = [length + 20 for length in situation["lengths"]]
        trial = Trial({**situation, "lengths": lengths, "layout": "padded"})
        for cut in cuts:
            for _ in range(12):
                trial.step()
            if not trial.near_tie:
                trial.crop(cut)
        for _ in range(8):
            trial.step()
        if not trial.near_tie:
            rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=2))
            trial.select([*rows, lengths.index(max(lengths))])  # buffers do not shrink when rows leave
        for _ in range(12):
            trial.step()
        return trial

    cuts = st.lists(st.integers(1, 25), min_size=2, max_size=2)
    expect_few_ties(run, {"situation": situations(), "cuts": cuts, "data": st.data()})


def test_only_clean_tokens_leave_the_buffer_under_rectification() -> None:
    """After `every` sparse steps those tokens are rewritten together with a new one, and count as clean again."""

    def run(situation: dict[str, Any], every: int, rounds: int) -> Trial:
        given = dict(situation["options"])
        given["budget"] += 2 * every
        trial = Trial({**situation, "options": {**given, "rectify": every}, "layout": "padded"})
        for _ in range(rounds):
            clean = trial.batch.lengths  # all that is cached
            for _ in range(every):
                trial.step(clean=clean)
            if trial.near_tie:
                break
            trial.batch.crop(every)
            trial.decoder.begin(trial.batch)
            trial.batch.extend(every + 1)
        return trial

    drawn = {"every": st.integers(1, 9), "rounds": st.integers(3, 6)}
    expect_few_ties(run, {"situation": situations(), **drawn})


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lower_index(dtype: str) -> None:
    """Chunks of equal keys, on two axes or zero: nearly every decision is a tie that is one in float32 too."""

    def run(seed: int, size: int) -> Trial:
        replant = 128 if seed % 2 else 5
        chunks = {"sinks": 4, "buffer": 8, "chunk_min": 4, "chunk_max": 4, "chunking": "fixed"}
        drawn = {"seed": seed, "lengths": [70, 33], "kv_heads": 1, "group": 2, "layout": "padded"}
        given = {"budget": 24, "replant": replant, **chunks, "cluster_size": size}
        trial = Trial({**drawn, "shortcut": True, "text": True, "options": given}, dtype, "crossed")
        for _ in range(17):
            trial.step()
        return trial

    # |q| is 39/16: a centroid at -q and a radius of 1 tie with a centroid at q.
    run(seed=401, size=1)
    # 35 % end early: at a tie of bounds whose radii have grown, and how they were rounded up is not ruled.
    expect_few_ties(run, {"seed": st.integers(0, 2**32 - 1), "size": st.integers(1, 4)}, 6, 0.7)


def test_layers_that_publish_refresh_from_the_index_and_others_reuse() -> None:
    def run(situation: dict[str, Any], budget: int) -> Trial:
        trial = Trial({**situation, "options": {"budget": budget + 15}}, publishing=True)
        for step in range(30):
            trial.step(outputs=step % 8 == 0)
        return trial

    expect_few_ties(run, {"situation": situations(), "budget": st.integers(33, 70)}, 3)
