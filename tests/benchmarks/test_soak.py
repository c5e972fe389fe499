"""`python -m benchmarks soak`: what a block holds, how steadiness is counted; no timing is judged here."""

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.__main__ import app
from benchmarks.growth import one_head, synthetic_keys
from benchmarks.soak import SoakJob, SoakSettings
from commands import invoker, tiny_model, told, write_model
from lab import runner
from lab.runner import Runner
from lab.steadiness import Steadiness, _LastSeen, at_random, clusters_of
from lab.whole_tree import WholeTree
from saccade.adapters.hf.run import sparsify
from saccade.checkpoints.load import ModelSource
from saccade.decode.stats import RunStats
from saccade.selection.clusters.selector import ClusterSelector
from trees import beside, edges_of

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 16
CLUSTER = "lychee_cluster:budget=48,sinks=4,dense_layers=1"
RESA = "resa:page=4,ratio=0.25,min_pages=2,rectify=5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), 400, layers=LAYERS, kv_heads=KV_HEADS)


def soaked(folder: Path, into: Path, *more: str, interrupted: bool = False) -> tuple[Result, dict[str, Any]]:
    files, sizes = (into / "soak.json", into / "soak.svg"), "--prompt 100 --tokens 46 --block 10 --window 4".split()
    asked = ("soak", "--model", folder, *sizes, "--policy", RESA, *more)
    result = invoker(app)(*asked, "--json", files[0], "--picture", files[1])
    return result, told(result, *files, interrupted=interrupted)


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    said, results = soaked(folder, tmp_path_factory.mktemp("soak"), "--policy", CLUSTER)
    assert all(name in said.stdout for name in ("ms per step", "keys and values", "Jaccard", "dense pass"))
    return results


@pytest.mark.parametrize(("left_out", "blocks", "watched"), [("--no-sets", 5, 0), ("--no-timed", 0, 1)])
def test_either_pass_can_be_left_out(folder: Path, tmp_path: Path, left_out: str, blocks: int, watched: int) -> None:
    _, results = soaked(folder, tmp_path, left_out)
    assert (len(results["blocks"]), len(results["steadiness"])) == (blocks, watched)


def test_an_interrupted_run_is_readable(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Runner.block

    def impatient(self: Runner, count: int) -> dict[str, Any]:
        if self._done:
            raise KeyboardInterrupt
        return measured(self, count)

    monkeypatch.setattr(Runner, "block", impatient)
    _, results = soaked(folder, tmp_path, interrupted=True)
    assert [row["step"] for row in results["blocks"]] == [10]


def test_policies_take_turns_over_all_tokens_and_dense_passes_are_timed_apart(finished: dict[str, Any]) -> None:
    turns = [(row["step"], row["policy"].partition(":")[0]) for row in finished["blocks"]]
    assert turns == [(step, name) for step in (10, 20, 30, 40, 46) for name in ("resa", "lychee_cluster")]
    assert all(row["context"] == 100 + row["step"] for row in finished["blocks"])
    passes = {row["policy"]: 0 for row in finished["blocks"]}
    for row in finished["blocks"]:
        passes[row["policy"]] += row["passes"]
        assert (row["ms_pass"] is None) == (row["passes"] == 0)
        assert row["ms_fast"] <= row["ms"] <= row["ms_slow"]
    assert passes == {RESA: 46 // 6, CLUSTER: 0}


def test_bytes_are_exact(finished: dict[str, Any]) -> None:
    # Keys and values in float32.
    token = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
    assert all(row["kv_bytes"] == row["context"] * token <= row["kv_reserved_bytes"] for row in finished["blocks"])
    last = finished["memory"][-1]
    assert last["kv_bytes"] == 2 * 146 * token
    assert last["index_bytes"] == sum(row["index_bytes"] for row in finished["blocks"][-2:]) > 0
    resa = [row for row in finished["blocks"] if row["policy"].startswith("resa")]
    # Minimum and maximum of every page of 4, with room to spare: at least half as much as K and V of a fourth.
    assert all(row["index_bytes"] >= math.ceil(row["context"] / 4) * token for row in resa)


def test_drift_and_sets_are_told_of_every_policy_and_sparse_step(finished: dict[str, Any]) -> None:
    resa, cluster = finished["drift"]
    assert (resa["policy"], cluster["policy"]) == (RESA, CLUSTER)
    assert cluster["pass"] is None and resa["pass"] is not None
    # ReSA's set grows with the row; the cluster's does not, only its index.
    assert resa["expected"]["slope"] > cluster["expected"]["slope"] >= 0
    steady = finished["steadiness"]
    assert len(steady[CLUSTER]["hit"]) == 46 - 1
    # Every sixth step is a dense pass and has no set.
    assert len(steady[RESA]["jaccard"]) == 46 - 46 // 6 - 1
    for series in steady.values():
        for hit, jaccard in zip(series["hit"], series["jaccard"], strict=True):
            assert 0 <= jaccard <= hit <= 1
        assert min(series["jaccard"]) < 1


def job_of(folder: Path) -> SoakJob:
    sizes: dict[str, Any] = {"prompt": 100, "tokens": 46, "block": 10, "window": 4, "timed": True, "sets": True}
    return SoakJob.check(SoakSettings(str(folder), (), **sizes, device="cpu", dtype="auto", threads=1))


def watch(watched: Steadiness, spec: str, job: SoakJob, tokens: int) -> RunStats:
    """Feed so many tokens to a row of 100 under a policy."""
    model = tiny_model(ModelSource.locate(None).tokenizer(), 400, layers=LAYERS, kv_heads=KV_HEADS)
    with sparsify(model, spec, tokenizer=job.tokenizer, observers=(watched,)) as run:
        runner = Runner(model, run, job.tokens, 100)
        watched.cache = runner.cache
        runner.prefill()
        with run.decoding():
            runner.feed(tokens)
        return run.stats()


@pytest.mark.parametrize("spec", [CLUSTER, RESA, "quest:page=4,budget=32,dense_layers=1"])
def test_watched_tokens_go_together_as_if_alone(folder: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watched pass feeds several tokens a call; the sets must be those of single steps."""
    job = job_of(folder)
    series = []
    for together in (1, 32):
        monkeypatch.setattr(runner, "_TOGETHER", together)
        watched = Steadiness(4)
        assert watch(watched, spec, job, 46).dense_passes == (46 // 6 if spec == RESA else 0)
        series.append(watched.series())
    assert series[0] == series[1] and series[0]["hit"]


@pytest.mark.parametrize("kind", [ClusterSelector, WholeTree])
def test_clusters_of_a_set_are_those_whose_chunks_it_holds(kind: type[ClusterSelector]) -> None:
    selector = kind(budget=60, sinks=3, buffer=12, chunk_min=3, chunk_max=6, replant=20)
    kv = one_head(synthetic_keys(300, HEAD_DIM, seed=0))
    index: Any = beside(selector).of(0, kv)
    selection = selector.select(torch.randn(1, 2, HEAD_DIM), kv, index, None, 1.0)
    edges, tree = edges_of(index), index.tree
    tokens = set(selection.ids[0, 0].tolist())
    taken = {chunk for chunk in range(len(edges) - 1) if edges[chunk] in tokens}
    offsets, members = tree.offsets[0, 0].tolist(), tree.members[0, 0].tolist()
    chosen = {
        number
        for at, number in enumerate(tree.numbers[0, 0].tolist())
        if at < -(-(len(edges) - 1) // 2) and taken & set(members[offsets[at] : offsets[at + 1]])
    }
    found = [number for number in clusters_of(tree, torch.tensor(edges), selection.ids[0])[0].tolist() if number >= 0]
    assert len(chosen) > 1 and sorted(found) == sorted(chosen)


@pytest.mark.parametrize("spec", ["lychee_cluster:budget=64", "lazy_clusters:budget=64", "quest:page=4,budget=32"])
def test_what_is_always_attended_is_not_retrieved(folder: Path, spec: str) -> None:
    """Clusters are counted whichever index has them, sinks and buffer left out; random sets are of the same sizes."""
    job, sizes = job_of(folder), list[tuple[int, int]]()

    class Watched(Steadiness):
        def _chosen(self, layer: int, span: Any, q: Any, kv: Any, selection: Any) -> Any:
            chosen, among = super()._chosen(layer, span, q, kv, selection)
            sizes.append((int((chosen >= 0).sum(axis=1).max()), among))
            assert chosen.max() < among
            return chosen, among

    watched = Watched(4, random=True)
    watch(watched, spec, job, 40)
    # 64 tokens are up to 8 chunks of 8, so at most 8 clusters; 16 sinks and a buffer would be as many tokens more.
    assert all(0 < most <= 8 and most < among <= 146 // 4 + 1 for most, among in sizes)
    series = watched.series()
    assert len({len(steps) for steps in series.values()}) == 1 and len(series["hit"]) >= 39
    difference = numpy.array(series["jaccard"]) - series["jaccard_of_random"]
    assert series["jaccard_above_random"] == pytest.approx(difference, abs=2e-4)


def test_random_sets_are_as_steady_as_chance() -> None:
    """Two sets of 20 of 100 share 4 in the mean: similarity about 4 / 36."""
    generator, seen, chosen = numpy.random.default_rng(1), _LastSeen(1, 4), numpy.arange(24)[None]
    chosen[:, 20:] = -1
    drawn = [at_random(chosen, 100, generator) for _ in range(400)]
    assert all(sorted(one[0, 20:]) == [-1] * 4 and len({*one[0, :20].tolist()}) == 20 for one in drawn)
    similar = [pair[1] for pair in map(seen.step, drawn) if pair is not None]
    # 400 draws, each off by .05: their mean by .003.
    assert abs(float(numpy.mean(similar)) - 4 / 36) < 0.012


@settings(max_examples=40)
@given(st.lists(st.lists(st.sets(st.integers(0, 11), max_size=5), min_size=2, max_size=2), min_size=2, max_size=12))
def test_steadiness_is_equations_3_and_4(steps: list[list[set[int]]]) -> None:
    window = 3
    seen = _LastSeen(2, window)
    for number, sets in enumerate(steps):
        rows = [sorted(chosen) + [-1] * (6 - len(chosen)) for chosen in sets]
        measured = seen.step(numpy.array(rows, dtype=numpy.int64))
        if number == 0:
            assert measured is None
            continue
        hits, similar = [], []
        for head, now in enumerate(sets):
            before = [step[head] for step in steps[max(0, number - window) : number]]
            union = now | before[-1]
            similar.append(len(now & before[-1]) / len(union) if union else 1.0)
            hits.append(len(now & set().union(*before)) / len(now) if now else 1.0)
        assert measured == pytest.approx((sum(hits) / 2, sum(similar) / 2))
