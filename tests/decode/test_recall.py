"""`run.stats()` and both recalls against the float64 oracle; recall costs nothing unless asked for."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from adapters import tiny
from adapters.ways import NEW, generate
from counting import used
from methods import oracles
from methods.cases import ORACLES
from methods.harness import SCALE, SOFTMAX, Decoder, SetRecorder
from methods.layouts import Batch
from mixtures import MIXTURES, decoder_of, expected
from saccade.decode.counters import Counters
from saccade.decode.recall import MeanRecall, RecallObserver, recall_of
from saccade.decode.stats import Rectifications, RunStats
from saccade.plans.roles import HeadSpan, RoleMap
from saccade.types import ModelShape, Role, Selection

LAYERS = 5
POLICIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "streaming": {"budget": 12},
    "quest": {"budget": 13, "page": 4},
    "tidal": {"budget": 9, "reselect": [3], "heads": "query"},
    "less_is_more": {"budget": 11, "reselect": [3]},
}
HAVING_A_SET = ("select", "reuse")

# 40 probabilities in float32, each off by some 30 roundings (see methods/harness.py): 40 * 30 * 2**-24 < 1e-4.
# Token recall is a quotient of whole numbers, rounded once: scores are exact (methods/layouts.py), and so are ranks.
ATTENTION, TOKEN = 1e-4, 2.0**-24


def token_recall(q: np.ndarray, k: np.ndarray, sets: list[list[int]]) -> list[float]:
    """The oracle for heads whose sets differ in size."""
    return [oracles.token_recall(q, k, sets, len(chosen))[head] for head, chosen in enumerate(sets)]


def check_stats(
    decoder: Decoder, batch: Batch, roles: list[list[str]], sets_of: Callable[[], list[oracles.Sets]], layout: str
) -> None:
    """Three steps: every number of the stats and every record is that of naive loops over the oracle's sets."""
    recall = RecallObserver(len(roles), keep_steps=True)
    decoder.state.observers = (decoder.recorder, recall)
    sizes, found = [], []  # [step and row][measure][layer][head]
    for _ in range(3):
        batch.step()
        decoder.step(batch, layout, torch.float32)
        for row, sets in enumerate(sets_of()):
            held = np.array([[len(chosen) for chosen in layer] for layer in sets])
            sizes.append((held, held / batch.lengths[row]))
            of_layers = list(zip(batch.q[row], batch.k[row], sets, strict=True))
            attention = [oracles.attention_recall(q, k, chosen, SCALE) for q, k, chosen in of_layers]
            found.append((attention, [token_recall(q, k, chosen) for q, k, chosen in of_layers]))
    stats, wanted = RunStats.of("any", decoder.counters, recall), np.array(found)
    group = batch.group
    having = np.array([[role in HAVING_A_SET for role in layer for _ in range(group)] for layer in roles])
    tokens, shares = (np.mean(part, axis=0) for part in zip(*sizes, strict=True))
    assert stats.steps == 3 and stats.share_attended == pytest.approx(shares.mean(), rel=1e-6)

    def expect(got: tuple[float | None, float | None], values: np.ndarray) -> None:
        for one, mean, tolerance in zip(got, values, (ATTENTION, TOKEN), strict=True):
            assert one == (None if np.isnan(mean) else pytest.approx(mean, abs=tolerance))

    for layer, got in enumerate(stats.layers):
        assert (got.steps, got.overflow) == (3, 0) and got.heads_with_set == pytest.approx(having[layer].mean())
        # float32 means of whole numbers.
        assert got.tokens == pytest.approx(tokens[layer].mean(), rel=1e-6)
        assert got.share == pytest.approx(shares[layer].mean(), rel=1e-6)
        expect((got.recall, got.token_recall), mean_of(wanted[:, :, layer, having[layer]]))
    expect((stats.recall, stats.token_recall), mean_of(wanted[:, :, having]))
    with_dense = stats.recall_with_dense, stats.token_recall_with_dense
    expect(with_dense, mean_of(np.where(having, wanted, 1.0)))

    records = recall.records()
    assert records.attention.shape == records.token.shape == (len(wanted), *having.shape)
    for measure, (kept, tolerance) in enumerate(((records.attention, ATTENTION), (records.token, TOKEN))):
        right = np.where(having, wanted[:, measure], np.nan)
        np.testing.assert_allclose(kept.numpy(), right, atol=tolerance, rtol=0, equal_nan=True)


def mean_of(values: np.ndarray) -> np.ndarray:
    """Of all but the second dimension, NaN of nothing."""
    flat = values.swapaxes(0, 1).reshape(2, -1)
    return flat.mean(1) if flat.size else np.full(2, np.nan)


@pytest.mark.parametrize("name", POLICIES)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    group=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(["padded", "paged"]),
)
@settings(max_examples=8, deadline=None)
def test_stats_and_records_are_the_oracles(name: str, seed: int, lengths: list[int], group: int, layout: str) -> None:
    batch = Batch.random(np.random.default_rng(seed), lengths, layers=LAYERS, kv_heads=2, group=group)
    plan = saccade.policy(name, **POLICIES[name]).plan(ModelShape(LAYERS, 2 * group, 2, batch.dim))

    def sets_of() -> list[oracles.Sets]:
        return [ORACLES[name](q, k, [], **POLICIES[name]).sets for q, k in zip(batch.q, batch.k, strict=True)]

    roles = [[role.value for role in layer] for layer in plan.roles.layers]
    check_stats(Decoder(plan), batch, roles, sets_of, layout)


@pytest.mark.parametrize(
    ("mixture", "budget", "shortcut"),
    [
        *((name, 8, True) for name in MIXTURES),
        *(("all four", budget, one) for budget in (24, 40) for one in (True, False)),
    ],
)
def test_means_are_over_heads_with_a_set(mixture: str, budget: int, shortcut: bool) -> None:
    """Layers of mixed roles, dense ones among them; 24 covers the shorter row, 40 both."""
    roles = MIXTURES[mixture]
    batch = Batch.random(np.random.default_rng(7), [30, 17], layers=len(roles), kv_heads=len(roles[0]), group=2)
    decoder = decoder_of(roles, "exact", "max", budget, shortcut=shortcut)
    check_stats(decoder, batch, roles, lambda: expected(batch, roles, "exact", "max", budget), "padded")


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    unit=st.sampled_from([1, 3, 4]),
    groups=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(["padded", "paged"]),
    content=st.sampled_from(["spread", "clustered", "constant"]),
)
@settings(max_examples=40, deadline=None)
def test_recalls_of_any_selection(
    seed: int, lengths: list[int], unit: int, groups: int, layout: str, content: str
) -> None:
    """One set for all heads, per KV head or per query head; tokens or pages; ragged rows, sets of any size, ties."""
    rng = np.random.default_rng(seed)
    batch = Batch.random(rng, lengths, layers=1, kv_heads=2, group=2, content=content)
    batch.step()
    view = batch.views(layout, torch.float32)[0]
    units = [-(-length // unit) for length in lengths]
    ids = np.full((len(lengths), groups, max(units)), -1)
    counts = rng.integers(1, np.array(units)[:, None] + 1, (len(lengths), groups))
    for row, available in enumerate(units):
        for head in range(groups):
            # The current token's unit is in every set.
            others = rng.permutation(available - 1)[: counts[row, head] - 1]
            ids[row, head, : counts[row, head]] = np.sort([*others, available - 1])
    selection = Selection(torch.tensor(ids, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32), unit)
    got = recall_of(batch.queries(0, torch.float32), view, selection, SOFTMAX)

    recorder = SetRecorder()
    recorder.observe(0, HeadSpan(0, 2, Role.SELECT), batch.queries(0, torch.float32), view, selection, SOFTMAX)
    for row, _ in enumerate(lengths):
        sets = [recorder.sets[row, 0, head] for head in range(4)]
        q, k = batch.q[row][0], batch.k[row][0]
        assert got.attention[row].tolist() == pytest.approx(oracles.attention_recall(q, k, sets, SCALE), abs=ATTENTION)
        assert got.token[row].tolist() == pytest.approx(token_recall(q, k, sets), abs=TOKEN)


def test_spans_of_a_layer_are_put_together_and_broken_steps_left_out() -> None:
    """Heads of mixed roles arrive one span after the other; tokens of one call layer by layer."""
    batch = Batch.random(np.random.default_rng(1), [9, 6], layers=2, kv_heads=2, group=2)
    recall = RecallObserver(2, keep_steps=True)
    steps = []
    for _ in range(3):
        batch.step()
        steps.append(batch.views("padded", torch.float32))
    narrow = Selection(torch.tensor([[[5]], [[3]]], dtype=torch.int32), torch.ones(2, 1, dtype=torch.int32))
    roles = RoleMap(((Role.PUBLISH, Role.PUBLISH), (Role.DENSE, Role.REUSE)))
    q = batch.queries(0, torch.float32)
    for views in (steps[0], steps[1]):  # two positions of one call: both at layer 0 first
        recall.observe(0, roles.spans[0][0], q, views[0], None, SOFTMAX)
    for views in (steps[0], steps[1]):
        recall.observe(1, roles.spans[1][0], q[:, :2], views[1].heads(0, 1), None, SOFTMAX)
        recall.observe(1, roles.spans[1][1], q[:, 2:], views[1].heads(1, 2), narrow, SOFTMAX)
    recall.observe(0, roles.spans[0][0], q, steps[2][0], None, SOFTMAX)  # broken off
    records = recall.records()
    assert records.attention.shape == (4, 2, 4)
    seen = ~records.attention.isnan()
    assert seen.tolist() == [[[False] * 4, [False, False, True, True]]] * 4
    one = recall_of(q[:, 2:], steps[1][1].heads(1, 2), narrow, SOFTMAX)
    assert torch.equal(records.attention[2:, 1, 2:], one.attention)
    assert torch.equal(records.token[2:, 1, 2:], one.token)
    means = recall.per_layer()
    assert means[0] == (None, None, 0.0)
    both = (values.double()[:, 1, 2:].mean() for values in (records.attention, records.token))
    assert means[1] == pytest.approx((*map(float, both), 0.5), abs=1e-9)


def test_means_lie_on_the_host_whatever_device_is_the_default() -> None:
    """vLLM makes a worker's observer while it builds a model, with a GPU for a default there."""
    batch = Batch.random(np.random.default_rng(2), [9, 6], layers=1, kv_heads=2, group=2)
    batch.step()
    (view,), q = batch.views("padded", torch.float32), batch.queries(0, torch.float32)
    sets = Selection(torch.tensor([[[5]], [[3]]], dtype=torch.int32), torch.ones(2, 1, dtype=torch.int32))
    (span,) = RoleMap(((Role.SELECT, Role.SELECT),)).spans[0]
    with torch.device("meta"):
        recall = RecallObserver(1)
    with_default, without = recall, RecallObserver(1)
    for observer in (with_default, without):
        observer.observe(0, span, q, view, sets, SOFTMAX, [True, False])
    assert with_default.per_layer() == without.per_layer()


def test_records_are_kept_on_request_only() -> None:
    assert RecallObserver(3, keep_steps=True).records().attention.shape == (0, 3, 0)
    with pytest.raises(ValueError, match="keep_steps=True"):
        RecallObserver(3).records()


def test_recall_costs_nothing_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def measured(q: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(args)
        return torch.ones(q.shape[:2]), torch.ones(q.shape[:2])

    monkeypatch.setattr("saccade.decode.recall.recall_of", measured)
    with saccade.sparsify(tiny.llama(), tiny.spec("quest", 9)) as run:
        generate(tiny.llama())
        assert all(layer.recall is layer.token_recall is None for layer in run.stats().layers)
        assert run.stats().to_dict()["recall"] is run.stats().to_dict()["token_recall"] is None
    assert not calls
    with saccade.sparsify(tiny.llama(), tiny.spec("quest", 9), recall=True) as run:
        assert run.stats().recall is None, "nothing decoded yet"
        generate(tiny.llama())
        # Whatever is measured here is 1, and so is the recall of heads whose budget covers the row.
        assert run.stats().recall == run.stats().token_recall == run.stats().recall_with_dense == 1.0
    with saccade.sparsify(tiny.llama(), "dense", recall=True) as run:
        generate(tiny.llama())
        assert run.stats().recall is None, "no head has a set"
        assert run.stats().recall_with_dense == 1.0
    assert calls


def test_what_is_derived_of_counts() -> None:
    none, counters = RunStats.of("dense", Counters(3), None), Counters(2)
    derived = ("share_attended", "recall", "token_recall", "overflow", "acceptance_rate", "tokens_per_dense_pass")
    assert none.steps == 0 and all(getattr(none, name) is none.to_dict()[name] is None for name in derived)
    for overflow in (1.0, 0.0, 0.5, 0.5):
        sets, over = [[8, 8]], [[overflow > 0, overflow > 0.5]]
        counters.add([used(0, [16], sets, overflowed=over), used(1, [16], sets)])
    stats = RunStats.of("tidal", counters, None)
    assert [layer.overflow for layer in stats.layers] == [0.5, 0.0]
    assert stats.overflow == stats.to_dict()["overflow"] == 0.25
    rewriting = RunStats.of("resa", Counters(1), None, rectification=Rectifications(passes=3, rewritten=96))
    assert (rewriting.dense_passes, rewriting.rectifications, rewriting.acceptance_rate) == (3, 96, None)
    verifying = RunStats.of("resa", Counters(1), None, rectification=Rectifications(4, 40, drafted=64, accepted=40))
    assert verifying.to_dict()["acceptance_rate"] == 0.625
    assert (rewriting.tokens_per_dense_pass, verifying.to_dict()["tokens_per_dense_pass"]) == (33, 11)


def test_stats_sum_over_calls_and_are_plain_data() -> None:
    with saccade.sparsify(tiny.llama(), tiny.spec("quest", 8)) as run:
        for turn in (1, 2, 3):
            generate(tiny.llama())
            assert run.stats().steps == turn * (NEW - 1)
        stats = json.loads(json.dumps(run.stats().to_dict()))
    assert stats["policy"].startswith("quest:") and len(stats["layers"]) == 4
    assert stats["index_bytes"] > 0 and stats["steps"] == 3 * (NEW - 1)
    assert stats["build_seconds"] > 0
    assert stats["share_attended"] == pytest.approx(np.mean([layer["share"] for layer in stats["layers"]]))


def test_leaving_more_dense_does_not_raise_the_mean() -> None:
    """What reversed comparisons: the same sets in one layer, with three layers dense around it or one."""
    one = MeanRecall(0.25, 0.5, 1.0)
    none = MeanRecall(None, None, 0.0)
    few, many = MeanRecall.over([one, none]), MeanRecall.over([one, none, none, none])
    assert few[:2] == many[:2] == (0.25, 0.5)
    assert few.with_dense == (0.625, 0.75) and many.with_dense == (0.8125, 0.875)
    assert MeanRecall.over([none, none]) == (None, None, 0.0) and none.with_dense == (1.0, 1.0)
    # Every head counts once: a layer with a quarter of its heads has a quarter of the say.
    assert MeanRecall.over([one, MeanRecall(0.75, 1.0, 0.25)])[:2] == pytest.approx((0.35, 0.6))
