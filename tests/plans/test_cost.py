"""The cost model: against arithmetic written out, against loops over layers and heads, and against what really runs."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from one_line import lacking, said
from saccade.errors import PolicyError
from saccade.eval.entry import terms_of
from saccade.methods.policy import Policy
from saccade.plans.cost import PARTS, Cost, cost_of
from saccade.plans.plan import Plan
from saccade.plans.rectify import Rectify
from saccade.plans.roles import RoleMap
from saccade.selection.clusters.selector import ClusterSelector
from saccade.selection.clusters.traffic import ClusterTraffic
from saccade.selection.costs import Bytes
from saccade.selection.rules import Framed, RankUnion, Ratio, Threshold, TopK, TopP
from saccade.selection.scorers.exact import ExactScorer
from saccade.selection.scorers.page_bounds import PageBoundScorer
from saccade.selection.selector import Rule, ScoredSelector, WindowSelector
from saccade.types import HeadGrouping, KVView, ModelShape, Pooling, Role, Rows
from trees import beside

LLAMA = ModelShape(layers=32, query_heads=32, kv_heads=8, head_dim=128)
LLAMA_PARAMETERS = 8_030_261_248  # as published, the input embedding among them
CONTEXT = 131_071  # with the decoded token 2^17 in all


def llama(spec: str, batch: int, weight_bytes: float = 2.0 * LLAMA_PARAMETERS, **others: Any) -> Cost:
    policy, sizes = Policy.from_spec(spec), {"context": CONTEXT, "kv_itemsize": 2, **others}
    return cost_of(policy.plan(LLAMA), policy.rectify, LLAMA, batch=batch, weight_bytes=weight_bytes, **sizes)


# Llama-3.1-8B at 2^17 tokens: a token's K and V take 2 * 128 * 2 = 512 bytes per KV head and layer; 2 * 16 GiB of both
# halves make 16 GiB = 17.18 GB per row.
TOKEN = 512
CACHE = 32 * 8 * 2**17 * TOKEN
NEW = 32 * 8 * TOKEN


def test_windows_are_read_by_every_policy_and_recurrent_layers_are_told() -> None:
    """Gemma-3-12B: 8 of 48 layers have full attention, the others a window of 1,024 tokens; 1,024 bytes per KV head."""
    kinds = ("sliding_attention",) * 5 + ("full_attention",)
    shape = ModelShape(48, 16, 8, 256, kinds=kinds * 8, window=1024)
    weights, full, windows = 2.0 * 11_765_788_416, 8 * 8 * 1024, 40 * 8 * 1024

    def cost(spec: str, of: ModelShape = shape, context: int = CONTEXT, **more: int) -> Cost:
        plan, sizes = Policy.from_spec(spec).plan(of), {"context": context, "batch": 1, **more}
        return cost_of(plan, None, of, kv_itemsize=2, weight_bytes=weights, **sizes)

    assert cost("dense").kv == Bytes(full * 2**17 + windows * 1024, full + windows)
    assert cost("dense", context=99).kv == Bytes((full + windows) * 100, full + windows)
    sparse = cost("streaming:budget=2048")
    assert sparse.kv == Bytes(full * 2048 + windows * 1024, full + windows)
    assert sparse.ceiling_over_dense == pytest.approx(1.352, abs=1e-3) and sparse.notes == ()
    recurrent = replace(shape, kinds=(("linear_attention",) * 5 + ("full_attention",)) * 8, window=None)
    assert cost("dense", recurrent).kv == Bytes(full * 2**17, full)
    assert cost("dense", recurrent).notes == ("what 40 layers of other kinds read is not counted",)
    states = 77_856_768
    told = cost("dense", recurrent, batch=3, state_bytes=states)
    assert told.kv == Bytes(3 * (full * 2**17 + states), 3 * (full + states)) and told.notes == ()
    few = cost("streaming:budget=2048", recurrent, batch=3, state_bytes=states)
    assert few.kv == Bytes(3 * (full * 2048 + states), 3 * (full + states)) and few.dense_total == told.total


def test_the_ceilings_by_hand() -> None:
    """The same by arithmetic on one line each: weights 16.06 GB, cache 17.18 GB per row, everything else left out.

    What is left out is scores, bounds' upkeep and new tokens: below 2% of any of these totals.
    """
    weights, cache = 16.06, 17.18
    by_hand = {
        "tidal:budget=2048,reselect=13": 4 / 32 + 28 / 32 * 2048 / 131_072,
        "less_is_more:budget=2048,reselect=13": 4 / 32 + 28 / 32 * 2048 / 131_072,
        "lychee_decode:budget=2048,roles=every:4": 8 / 32 + 24 / 32 * 2048 / 131_072,
        "quest:budget=2048": 2 / 32 + 30 / 32 * (2048 / 131_072 + 1 / 16),
        "streaming:budget=2048": 2048 / 131_072,
        # 8 units of 64 clusters for every 128 chunks of 12 tokens: 683; of their clusters those with 4 * 1024 tokens:
        # 171; and half a group's keys once per 128 tokens: half a token each.
        "lychee_cluster:budget=1024,form=paper": 2 / 32 + 30 / 32 * (1024 + (683 + 171 + 768 / 128) / 2) / 131_072,
        # A mean for every chunk of 12 tokens, or for every 8 tokens. A key and a value have 512 bytes; of every token a
        # score is written and read, 8, and its set's number is read, 4 or 2; of every set a logit of 4 query heads is
        # written and read, 32, a spread and a size are read, 8.
        "lychee_cluster:budget=1024": 2 / 32 + 30 / 32 * (1024 / 131_072 + 1 / 12 / 2 + (12 + 40 / 12) / 512),
        "token_clusters:budget=1024": 2 / 32 + 30 / 32 * (1024 / 131_072 + 1 / 8 / 2 + (10 + 40 / 8) / 512),
        "resa": (32 * (1 / 16 + 1 / 10) + 1) / 33,
    }
    for spec, share in by_hand.items():
        for batch in (1, 8):
            expected = (weights + batch * cache) / (weights + batch * cache * share)
            assert llama(spec, batch).ceiling_over_dense == pytest.approx(expected, rel=0.02)


def test_cluster_written_out() -> None:
    """Lengths chosen so that nothing is rounded: 3072 chunks of 16 in 24 groups, each of 64 clusters in 8 units."""
    policy = Policy.from_spec("lychee_cluster:form=paper,budget=1024,chunking=fixed")
    length = 16 + 3072 * 16 + 64 + 8 + 1
    cost = cost_of(
        policy.plan(LLAMA), None, LLAMA, context=length - 1, batch=1, kv_itemsize=2, weight_bytes=2.0 * LLAMA_PARAMETERS
    )
    heads, vector = 30 * 8, 256
    assert cost.kv == Bytes(2 * 8 * length * TOKEN + heads * 1024 * TOKEN, NEW)
    # 192 units of 256 tokens; the 16th reaches 4 * 1024: 16 times 8 clusters.
    units, candidates = 192, 16 * 8
    assert cost.scores.read == cost.scores.written == pytest.approx(heads * 4 * (units + candidates), rel=1e-12)
    # A node is its centroid and radius; a unit has two integers beside, a cluster one.
    search = units * (vector + 4 + 8) + candidates * (vector + 4 + 4)
    # Every 128 tokens the last group, half full: 64 chunks of 16 keys; 32 clusters, 6 units and 64 members written.
    written = (32 + 6) * (vector + 4 + 8) + 64 * 4
    assert cost.index.read == pytest.approx(heads * (search + 64 * 16 * vector / 128), rel=1e-12)
    assert cost.index.written == pytest.approx(heads * written / 128, rel=1e-12)


def test_the_index_that_is_counted_is_the_one_that_is_built() -> None:
    torch.manual_seed(0)
    selector = ClusterSelector(budget=128, chunking="fixed", buffer=32, sinks=0)
    length = 256 * 16 + 16 + 8 + 1
    rows = Rows.on_host(torch.zeros(1, 1, dtype=torch.int32), [0], [length])
    kv = KVView(torch.randn(1, length, 2, 8), torch.randn(1, length, 2, 8), rows)
    index = beside(selector).of(0, kv)
    counted = ClusterTraffic(selector, length)
    assert int(index.owner.table.counts[0]) == counted.chunks == 256
    assert int((index.tree.unit_tokens[0, 0] > 0).sum()) == counted.units == 16
    # k-means decides how large units are, so the candidates are a mean that a search may miss by a unit's clusters.
    chosen = selector.select(torch.randn(1, 4, 8), kv, index, None, 1.0)
    assert 128 - 16 < int(chosen.counts.min()) <= int(chosen.counts.max()) <= selector.size(length) == 128


def test_rectification_adds_nothing_to_a_cluster_index() -> None:
    """Decoded tokens wait in the buffer until they are clean, so each is taken in once: 33 tokens of a cycle, once."""
    plain, rectified = (llama(f"lychee_cluster:form=paper,buffer=128{option}", 1) for option in ("", ",rectify=32"))
    upkeep = plain.index.written * 33
    per_cycle = (rectified.index.written + rectified.rectification.written - 32 / 33 * NEW) * 33
    assert per_cycle == pytest.approx(upkeep, rel=1e-9)
    assert any("chunks of 12 tokens" in note for note in plain.notes)


# Any plan, against loops that look at one head of one layer at a time.

SHAPE = ModelShape(layers=4, query_heads=6, kv_heads=2, head_dim=8)
POOLING: dict[HeadGrouping, Pooling] = {"kv": "mean", "query": "each", "all": "each"}


def slow_cost(
    roles: list[list[Role]], heads: HeadGrouping, page: int | None, budget: int, rectify: Rectify | None,
    length: int, batch: int, itemsize: int, weight_bytes: float, acceptance: float,
) -> dict[str, np.ndarray]:  # fmt: skip
    """TopK over tokens by exact scores (page None) or over pages by bounds: read and written, part by part."""
    vector, unit = 8 * itemsize, page or 1
    units = math.ceil(length / unit)
    step, rewritten = {part: np.zeros(2) for part in PARTS}, np.zeros(2)
    for layer in roles:
        refreshed = any(role in (Role.PUBLISH, Role.SELECT) for role in layer)
        for role in layer:
            tokens = length
            if role in (Role.SELECT, Role.REUSE):
                tokens = min(length, budget // unit * unit * (3 if heads == "query" else 1))
            step["kv"] += 2 * tokens * vector, 0
            if role in (Role.PUBLISH, Role.SELECT):
                step["scores"] += 4 * units * (1 if heads == "kv" else 3)
                step["index"] += 0 if page is None else 2 * units * vector, 0
            if page is None and role is Role.SELECT:
                step["index"] += length * vector, 0
            if page is not None and refreshed:
                upkeep = np.array((page * vector, 2 * vector))
                step["index"] += upkeep
                # Over all alignments of every + 1 neighbouring tokens: the mean number of pages they lie in.
                count = 0 if rectify is None else rectify.every + 1
                rewritten += sum((start + count - 1) // page + 1 for start in range(page)) / page * upkeep
    new, sparse = 4 * 2 * 2 * vector, 1 if rectify is None else rectify.every
    cycle = {part: sparse * batch * moved for part, moved in step.items()}
    cycle["kv"] += 0, sparse * batch * new
    cycle["weights"] += sparse * weight_bytes, 0
    gained = float(sparse)
    if rectify is not None:
        cycle["kv"] += 0, batch * new
        cycle["weights"] += weight_bytes, 0
        cycle["rectification"] += batch * (rewritten + np.array((length * new, sparse * new)))
        gained = 1 + (sparse if rectify.mode == "overwrite" else sparse * acceptance)
    return {part: moved / gained for part, moved in cycle.items()}


@given(data=st.data())
def test_any_plan_against_a_walk_over_its_heads(data: st.DataObject) -> None:
    """Sums of exact products in float64: the two orders of summation differ by rounding only (rel 1e-9)."""
    heads: HeadGrouping = data.draw(st.sampled_from(["kv", "query", "all"]))
    page = data.draw(st.sampled_from([None, 4, 16]))
    top = (Role.DENSE, Role.PUBLISH, Role.SELECT)
    role = st.sampled_from([*top, Role.REUSE])
    first = st.sampled_from([Role.PUBLISH, Role.SELECT])
    if heads == "all":
        roles = [[one] * 2 for one in (data.draw(first), *(data.draw(role) for _ in range(3)))]
    else:
        roles = [[data.draw(first) for _ in range(2)]] + [[data.draw(role) for _ in range(2)] for _ in range(3)]
    budget = data.draw(st.integers(16, 60))
    length = data.draw(st.integers(budget + 1, 200))
    every, mode = data.draw(st.integers(1, 40)), data.draw(st.sampled_from(["overwrite", "verify"]))
    rectify = data.draw(st.sampled_from([None, Rectify(every, mode)]))
    batch, itemsize = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4]))
    acceptance = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    scorer = ExactScorer(POOLING[heads]) if page is None else PageBoundScorer(page, POOLING[heads])
    plan = Plan(ScoredSelector(scorer, TopK(budget), heads), RoleMap(tuple(map(tuple, roles))))
    sizes = {"context": length - 1, "batch": batch, "kv_itemsize": itemsize}
    cost = cost_of(plan, rectify, SHAPE, **sizes, weight_bytes=1000.0, acceptance=acceptance)
    expected = slow_cost(roles, heads, page, budget, rectify, length, batch, itemsize, 1000.0, acceptance)
    for part, moved in expected.items():
        own = getattr(cost, part)
        assert (own.read, own.written) == pytest.approx(tuple(moved), rel=1e-9), part
    assert cost.total == pytest.approx(sum(moved.sum() for moved in expected.values()), rel=1e-9)
    assert any("sets of query heads" in note for note in cost.notes) == (heads == "query")
    assert cost.dense_total == 1000 + batch * (length + 1) * 4 * 2 * 2 * 8 * itemsize


# What a rule says about its sets, against the sets that it makes.

TOKEN_RULES: list[Rule] = [
    TopK(7),
    TopK(40),
    RankUnion(budget=9, sinks=2, recent=0.25),
    Ratio(0.1, minimum=4, local=2),
    TopP(0.9, buffer=6),
    TopP(1.0, buffer=64),
    Threshold(0.02, buffer=10),
    Framed(Threshold(0.02, buffer=10), 2, 3),
    Ratio(0.3, framed=True),
]
PAGE_RULES: list[Rule] = [TopK(8), TopK(17), Ratio(0.1, minimum=4, local=2), Framed(TopK(17), 2, 5)]
LENGTHS = (1, 5, 16, 17, 39, 61)


@pytest.mark.parametrize(
    ("rule", "unit"), [(rule, 1) for rule in TOKEN_RULES] + [(rule, 4) for rule in PAGE_RULES], ids=str
)
def test_rules_know_the_size_of_their_sets(rule: Rule, unit: int) -> None:
    for length in LENGTHS:
        torch.manual_seed(length)
        rows = Rows.on_host(torch.zeros(1, 1, dtype=torch.int32), [0], [length])
        counts = [
            int(rule.choose(torch.randn(1, 1, -(-length // unit)) * spread, rows, unit, 1.0).counts.max())
            for spread in (0.0, 1.0, 9.0)
        ]
        assert min(counts) >= 1 and max(counts) <= rule.size(length, unit)
        assert not rule.fixed_size or {*counts} == {rule.size(length, unit)}


@pytest.mark.parametrize(
    ("spec", "frame", "dense_layers", "read"),
    [
        # Of 32 layers of 8 KV heads at 65,536 tokens; a page's two bounds are an eighth of its keys.
        ("dense", None, 32, 1.0),
        ("streaming:budget=4096,dense_layers=2", (4, 4092), 2, (2 + 30 / 16) / 32),
        ("quest:budget=4096", (0, 16), 2, (2 + 30 * (1 / 16 + 1 / 16)) / 32),
        ("tidal:budget=4096,reselect=16,sinks=4,window=64", (4, 64), 2, (4 + 28 / 16) / 32),
        ("less_is_more:budget=4096,reselect=16", (4, 1020), 2, (4 + 28 / 16) / 32),
        ("lychee_decode:budget=4096,roles=every:4", (128, 256), 0, (8 + 24 / 16) / 32),
        ("lychee_decode:rule=ratio,ratio=0.0625,roles=every:4", (128, 256), 0, (8 + 24 / 16) / 32),
        ("composed:rule=rank_union,scorer=page_bounds,budget=4096", (16, 1008), 2, (2 + 30 * (1 / 16 + 1 / 16)) / 32),
        ("resa:ratio=0.0625,rectify=31", (0, 16), 0, (1 / 16 + 1 / 16) * 31 / 32 + 1 / 32),
    ],
)
def test_terms_of_a_comparison(spec: str, frame: tuple[int, int] | None, dense_layers: int, read: float) -> None:
    terms = terms_of(Policy.from_spec(spec), ModelShape(32, 32, 8, 128), 65_536)
    assert terms["frame"] == frame and terms["dense_layers"] == dense_layers
    # Upkeep reads some pages more.
    assert terms["cache_read"] == pytest.approx(read, rel=4e-3)


def test_the_window_knows_its_size() -> None:
    selector = WindowSelector(budget=10, sinks=2)
    for length in (1, 9, 10, 11, 50):
        rows = Rows.on_host(torch.zeros(1, 1, dtype=torch.int32), [0], [length])
        kv = KVView(torch.zeros(1, length, 1, 2), torch.zeros(1, length, 1, 2), rows)
        assert selector.size(length) == int(selector.select(torch.zeros(1, 1, 2), kv, None, None, 1.0).counts.max())


def test_sets_are_counted_as_full_and_their_scores_token_by_token() -> None:
    fixed, open_ended = llama("tidal:budget=2048", 1), llama("tidal:rule=top_p,top_p=0.9,budget=2048", 1)
    assert open_ended.kv == fixed.kv and any("full buffer" in note for note in open_ended.notes)
    assert fixed.notes == ()
    tokens, blocks = (llama(f"lychee_decode:budget=2048,roles=every:4,page={page}", 1) for page in (1, 64))
    assert blocks.scores == tokens.scores and blocks.kv == tokens.kv


@pytest.mark.parametrize("spec", ["quest", "streaming", "resa"])
def test_a_budget_that_holds_everything_is_dense_attention(spec: str) -> None:
    cost, dense = (llama(one, 3, weight_bytes=1e9, context=200) for one in (spec, "dense"))
    assert replace(cost, notes=()) == dense and "201 tokens" in cost.notes[0]


def test_verification_costs_weights_too_and_says_what_it_assumes() -> None:
    def at(acceptance: float) -> Cost:
        return llama("resa:rectify=16:verify", 1, weight_bytes=17.0, acceptance=acceptance)

    assert replace(at(1.0), notes=()) == replace(llama("resa:rectify=16", 1, weight_bytes=17.0), notes=())
    # Half of 16 drafts stand: 17 reads of the weights give 9 tokens, not 17.
    assert at(0.5).weights.read == pytest.approx(17 * 17 / 9)
    assert at(0.5).total == pytest.approx(at(1.0).total * 17 / 9)
    assert at(0.0).weights.read == pytest.approx(17 * 17)
    assert "acceptance 0.5: of 16 drafts 8 " in at(0.5).notes[0]


def test_bad_values() -> None:
    plan = Policy.from_spec("tidal").plan(LLAMA)
    usual: dict[str, Any] = {"shape": LLAMA, "context": 1000, "batch": 1, "kv_itemsize": 2, "weight_bytes": 1.0}
    refused: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"context": -1}, ("context=-1", "at least 0")),
        ({"batch": 0}, ("batch=0", "at least 1")),
        ({"batch": True}, ("batch=True", "whole number")),
        ({"kv_itemsize": 0}, ("kv_itemsize=0", "more than 0")),
        ({"kv_itemsize": math.nan}, ("kv_itemsize=nan", "more than 0")),
        ({"weight_bytes": math.inf}, ("weight_bytes=inf", "finite")),
        ({"state_bytes": -2}, ("state_bytes=-2", "at least 0")),
        ({"acceptance": 1.01}, ("acceptance=1.01", "0 to 1")),
        ({"shape": replace(LLAMA, layers=31)}, ("32 layers", "31")),
        ({"shape": replace(LLAMA, kv_heads=4)}, ("8 KV heads", "of 4")),
    ]
    lines = ((said(PolicyError, cost_of, plan, None, **{**usual, **changed}), words) for changed, words in refused)
    assert lacking(lines) == []
