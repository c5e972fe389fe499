"""`run.stats()` and attention recall against the float64 oracle; recall costs nothing unless asked for."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from adapters import tiny
from adapters.ways import generate
from policies import oracles
from policies.harness import SCALE, Decoder, SetRecorder
from policies.layouts import Batch
from saccade.counters import Counters
from saccade.recall import RecallObserver, attention_recall
from saccade.roles import HeadSpan
from saccade.stats import RunStats
from saccade.types import KVView, ModelShape, Selection

LAYERS = 5
POLICIES = {
    "dense": {},
    "streaming": {"budget": 12},
    "quest": {"budget": 13, "page": 4},
    "tidal": {"budget": 9, "reselect": [3], "heads": "query"},
    "less_is_more": {"budget": 11, "reselect": [3]},
}
ORACLES = {name: getattr(oracles, name) for name in POLICIES}


@pytest.mark.parametrize("name", POLICIES)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    group=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(["padded", "paged"]),
)
@settings(max_examples=8, deadline=None)
def test_stats_are_the_oracles_means(name: str, seed: int, lengths: list[int], group: int, layout: str) -> None:
    batch = Batch.random(np.random.default_rng(seed), lengths, layers=LAYERS, kv_heads=2, group=group)
    plan = saccade.policy(name, **POLICIES[name]).plan(ModelShape(LAYERS, 2 * group, 2, batch.dim))
    decoder, recall = Decoder(plan), RecallObserver(LAYERS)
    decoder.state.observers = (decoder.recorder, recall)
    tokens: dict[int, list[int]] = defaultdict(list)
    shares: dict[int, list[float]] = defaultdict(list)
    recalls: dict[int, list[float]] = defaultdict(list)
    overall = []
    for _ in range(3):
        batch.step()
        decoder.step(batch, layout, torch.float32)
        for row, length in enumerate(batch.lengths):
            sets = ORACLES[name](batch.q[row], batch.k[row], **POLICIES[name])
            overall.append(oracles.share_attended(sets, length))
            for layer in range(LAYERS):
                tokens[layer] += [len(s) for s in sets[layer]]
                shares[layer] += [len(s) / length for s in sets[layer]]
                recalls[layer] += oracles.attention_recall(batch.q[row][layer], batch.k[row][layer], sets[layer], SCALE)
    stats = RunStats.of(name, decoder.counters, recall.per_layer(), 0)
    assert stats.steps == 3
    for layer, got in enumerate(stats.layers):
        assert got.steps == 3
        assert got.tokens == pytest.approx(np.mean(tokens[layer]), rel=1e-6)  # float32 means of whole numbers
        assert got.share == pytest.approx(np.mean(shares[layer]), rel=1e-6)
        # 40 probabilities in float32, each off by some 30 roundings (see policies/harness.py): 40 * 30 * 2**-24.
        assert got.recall == pytest.approx(np.mean(recalls[layer]), abs=1e-4)
    assert stats.share_attended == pytest.approx(np.mean(overall), rel=1e-6)
    assert stats.recall == pytest.approx(np.mean([np.mean(recalls[layer]) for layer in range(LAYERS)]), abs=1e-4)


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    unit=st.sampled_from([1, 3, 4]),
    groups=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(["padded", "paged"]),
)
@settings(max_examples=25, deadline=None)
def test_recall_of_any_selection(seed: int, lengths: list[int], unit: int, groups: int, layout: str) -> None:
    """One set for all heads, per KV head or per query head; tokens or pages; ragged rows."""
    rng = np.random.default_rng(seed)
    batch = Batch.random(rng, lengths, layers=1, kv_heads=2, group=2)
    batch.step()
    view = batch.views(layout, torch.float32)[0]
    units = [-(-length // unit) for length in lengths]
    ids = np.full((len(lengths), groups, max(units)), -1)
    counts = rng.integers(1, np.array(units)[:, None] + 1, (len(lengths), groups))
    for row, available in enumerate(units):
        for head in range(groups):
            chosen = np.sort(rng.permutation(available)[: counts[row, head]])
            ids[row, head, : len(chosen)] = chosen
    selection = Selection(torch.tensor(ids, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32), unit)
    got = attention_recall(batch.queries(0, torch.float32), view, selection, scale=SCALE)

    recorder = SetRecorder()
    recorder.observe(0, HeadSpan(0, 2, None), batch.queries(0, torch.float32), view, selection, SCALE)  # type: ignore[arg-type]
    for row, _ in enumerate(lengths):
        sets = [recorder.sets[row, 0, head] for head in range(4)]
        expected = oracles.attention_recall(batch.q[row][0], batch.k[row][0], sets, SCALE)
        assert got[row].tolist() == pytest.approx(expected, abs=1e-4)


def test_run_measures_recall_on_request() -> None:
    """The run's numbers are those of the sets and queries that its observers see."""

    class Recomputing:
        def __init__(self) -> None:
            self.recalls: dict[int, list[float]] = defaultdict(list)
            self.tokens: dict[int, list[int]] = defaultdict(list)

        def observe(
            self, layer: int, span: HeadSpan, q: torch.Tensor, kv: KVView, selection: Selection | None, scale: float
        ) -> None:
            recorder = SetRecorder()
            recorder.observe(layer, span, q, kv, selection, scale)
            for row, length in enumerate(kv.rows.seq_lens.tolist()):
                start = int(kv.rows.row_start[row])
                keys = kv.k[row, start : start + length].transpose(0, 1).double().numpy()
                sets = [recorder.sets[row, layer, head] for head in range(q.shape[1])]
                self.recalls[layer] += oracles.attention_recall(q[row].double().numpy(), keys, sets, scale)
                self.tokens[layer] += [len(s) for s in sets]

    model, recomputing = tiny.llama(), Recomputing()
    with saccade.sparsify(model, tiny.spec("tidal", 9), recall=True, observers=(recomputing,)) as run:
        generate(model, **tiny.padded([30, 7, 19]))
        stats = run.stats()
    for layer, got in enumerate(stats.layers):
        assert got.tokens == pytest.approx(np.mean(recomputing.tokens[layer]), rel=1e-6)
        assert got.recall == pytest.approx(np.mean(recomputing.recalls[layer]), abs=1e-4)
    assert [layer.recall == 1.0 for layer in stats.layers] == [True, True, False, True]
    assert 0 < stats.recall < 1 and 0 < stats.share_attended < 1


def test_recall_costs_nothing_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("saccade.recall.attention_recall", lambda *args, **kwargs: calls.append(args) or torch.ones(1))
    with saccade.sparsify(tiny.llama(), tiny.spec("quest", 9)) as run:
        generate(tiny.llama())
        assert run.stats().recall is None and all(layer.recall is None for layer in run.stats().layers)
        assert run.stats().to_dict()["recall"] is None
    assert not calls
    with saccade.sparsify(tiny.llama(), tiny.spec("quest", 9), recall=True) as run:
        assert run.stats().recall is None, "nothing decoded yet"
        generate(tiny.llama())
        assert run.stats().recall == 1.0
    assert calls


def test_stats_before_the_first_step() -> None:
    stats = RunStats.of("dense", Counters(3), None, 0)
    assert stats.steps == 0 and stats.share_attended is None and stats.recall is None


def test_stats_sum_over_calls_and_are_plain_data() -> None:
    import json

    with saccade.sparsify(tiny.llama(), tiny.spec("quest", 8)) as run:
        for turn in (1, 2, 3):
            generate(tiny.llama())
            assert run.stats().steps == turn * 8
        stats = json.loads(json.dumps(run.stats().to_dict()))
    assert stats["policy"].startswith("quest:") and len(stats["layers"]) == 4
    assert stats["index_bytes"] > 0 and stats["steps"] == 24
    assert stats["share_attended"] == pytest.approx(np.mean([layer["share"] for layer in stats["layers"]]))
