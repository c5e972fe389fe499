"""`saccade bench serve` without vLLM: what is refused in one line, and what figures mean beside each other."""

import json
import math
import sys
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch

from commands import Fails
from one_line import lacking, said
from printing import printed
from saccade import SaccadeError
from saccade.bench import engines, grid, serving
from saccade.bench.serving import EMPTY, ServingJob, ServingSettings
from saccade.bench.variants import STOCK_AGAIN
from saccade.recipes import machine
from saccade.report.timings import serving_table

SETTINGS: dict[str, Any] = {
    "shape": "smollm2-135m", "contexts": ["8192"], "batches": ["1,4"], "threads": ["1"], "policies": ["quest"],
    "budgets": ["2048"], "steps": 4, "block": 32, "dtype": "bfloat16", "device": "cpu",
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("clocked")


def checked(**changed: Any) -> ServingJob:
    return ServingJob.check(ServingSettings(**{**SETTINGS, **changed}))


def test_refusals() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"batches": ["0"]}, "batch '0' is not valid"),
        ({"policies": ["resa"]}, "add rectify=none"),
        ({"rectify_together": True}, "none of these policies has dense passes"),
        ({"policies": ["quest:page=24"]}, "block=32 is no multiple of its page=24; pass --block 48"),
        ({"block": 24}, "block=24 is not valid"),
        ({"points": ["16x1,131072"]}, "point '131072' is not valid: CONTEXTxBATCH"),
        ({"points": ["0x1"]}, "point '0x1' is not valid"),
        ({"points": ["4096x1"], "max_model_len": 4096}, "max-model-len=4096 has no room for a context of 4096 tokens"),
        ({"tensor_parallel": 2}, "tensor-parallel=2 is not valid on a CPU"),
        ({"memory": 1.5}, "memory=1.5 is not valid"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv-cache-dtype=fp8_e5m2 is not valid: one of auto, bfloat16, float16, fp8, "),
        ({"quantization": "fp8_per_tensor"}, "quantization=fp8_per_tensor needs --device cuda"),
        ({"policies": ["lychee_cluster"]}, "reads text: shape 'smollm2-135m' has no tokenizer"),
    ]
    assert lacking((said(SaccadeError, checked, **changed), (words,)) for changed, words in refused) == []


def test_points_are_measured_as_given_behind_the_empty_contexts_and_dense_only_if_asked_for() -> None:
    job = checked()
    assert job.points == ((EMPTY, 1), (EMPTY, 4), (8192, 1), (8192, 4))
    assert list(job.policies) == ["stock", "quest:budget=2048"] and job.units == 4
    assert list(checked(policies=["dense"]).policies) == ["stock", "dense"]
    job = checked(points=["131072x4,16x1", "2048x28"])
    assert job.points == ((EMPTY, 4), (EMPTY, 1), (EMPTY, 28), (131072, 4), (2048, 28))
    assert job.longest == 131072 + job.room
    assert checked(points=["4096x1"], max_model_len=131072).longest == 131072


def test_a_file_that_cannot_be_written_is_refused_first(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(engines.EngineJob, "run")
    # Whether vLLM is there is told before. The module is hidden behind its command group.
    monkeypatch.setattr(sys.modules["saccade.cli.bench"], "find_spec", lambda name: object())
    assert "cannot be written" in fails("bench", "serve", "--json", "/nowhere/rows.json")


class Clocked:
    """Stands in for an engine: a round takes 10 parts per row, and one per 512 tokens of a row that are read.

    Every `period` rounds one takes `dense` parts more.
    """

    period, dense, gained = 10**9, 0.0, 5.0
    started: ClassVar[list[str]] = []
    given: ClassVar[list[dict[str, Any]]] = []
    slower = 1.0

    def __init__(self, options: Any, **settings: Any) -> None:
        self.name = "stock" if options is None else str(options.policy)
        self.given.append({**settings, "name": self.name})
        if self.name == "streaming:budget=2048":
            raise RuntimeError("no such kernel\nand much more")
        self.facts = {"tokens": 50_000}
        self.started.append(self.name)
        self.again = self.started.count("stock") > 1
        self.now, self.rounds = 0.0, 0

    def begin(self, context: int, batch: int) -> None:
        read = min(context, 2048) if self.name.startswith("quest") else context
        self.ms = 10 * batch + batch * read / 512
        self.begun = self.now, self.rounds
        if self.again and context > EMPTY:
            self.ms *= Clocked.slower

    def round(self) -> float:
        self.rounds += 1
        self.now += (self.ms + (self.dense if self.rounds % self.period == 0 else 0.0)) / 1024
        return self.now

    @property
    def pace(self) -> float:
        return (self.now - self.begun[0]) / (self.rounds - self.begun[1])

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clocked, "started", [])
    monkeypatch.setattr(Clocked, "given", [])
    monkeypatch.setattr(serving, "SyntheticEngine", Clocked)
    monkeypatch.setattr(engines, "prepare_process", lambda served: None)
    monkeypatch.setattr(machine, "read_bandwidth", lambda device: 100.0)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)


def test_shares_and_speedups_are_those_of_the_same_batch() -> None:
    rows = checked().run(lambda unit, results: None)["rows"]
    found = {(row["policy"], row["context"], row["batch"]): row for row in rows}
    assert len(found) == len(rows) == 8
    for (_, context, batch), row in found.items():
        empty, stock = found["stock", EMPTY, batch], found["stock", context, batch]
        ideal = empty["ms_per_token"] + (row["bytes"] - empty["bytes"]) / 100e9 * 1e3
        assert row["ideal_ms"] == pytest.approx(ideal)
        assert row["share_of_ceiling"] == pytest.approx(ideal / row["ms_per_token"])
        assert row["speedup_over_stock"] == pytest.approx(stock["ms_per_token"] / row["ms_per_token"])
        assert (row["drift"], row["void"], row["steps"]) == (None, False, 4)
    assert found["quest:budget=2048", 8192, 4]["speedup_over_stock"] == pytest.approx((10 + 16) / (10 + 4))
    token = 2 * 30 * 3 * 64 * 2  # keys and values, layers, heads, head dim, bytes
    grown = found["stock", 8192, 4]["bytes"] - found["stock", EMPTY, 4]["bytes"]
    assert grown == 4 * (8192 - EMPTY) * token


@pytest.mark.parametrize(("dtype", "size"), [("auto", 2), ("fp8", 1)])
def test_the_ceiling_counts_a_number_of_the_cache_by_its_own_size(dtype: str, size: int) -> None:
    """Keys, values and bounds, of every engine; weights as they are. Every engine is told, stock too."""
    results = checked(kv_cache_dtype=dtype).run(lambda unit, results: None)
    found = {(row["policy"], row["context"], row["batch"]): row["bytes"] for row in results["rows"]}
    vectors = 30 * 3 * 64 * size  # layers, heads, head dim, bytes
    assert found["stock", 8192, 1] - found["stock", EMPTY, 1] == (8192 - EMPTY) * 2 * vectors
    # 28 layers select: bounds of 513 pages and scores in float32, written and read, of each; 2,048 tokens, and a
    # page's keys read and its bounds written where the new token fell.
    dense, selecting = 2 * vectors // 30, 28 * vectors // 30
    bounds, scores = 513 * 2 * selecting, 28 * 3 * 513 * 4 * 2
    attended = 8193 * 2 * dense + 2048 * 2 * selecting
    upkeep = (16 + 2) * selecting
    weights = found["stock", EMPTY, 1] - (EMPTY + 1 + 1) * 2 * vectors
    written = 2 * vectors
    assert found["quest:budget=2048", 8192, 1] == weights + attended + written + bounds + scores + upkeep
    assert {settings["kv_cache_dtype"] for settings in Clocked.given} == {dtype}
    assert (f"bfloat16 on a cache in {dtype}," in "\n".join(printed(serving_table(results), 200))) == (dtype != "auto")


def test_room_on_a_cpu_is_that_of_the_caches_numbers() -> None:
    for dtype in ("auto", "fp8"):
        checked(kv_cache_dtype=dtype).run(lambda unit, results: None)
    plain, small = (settings["kv_cache_memory_bytes"] for settings in Clocked.given[::2])
    assert plain == 2 * small


def alone(**changed: Any) -> ServingJob:
    """A job whose engines run as on a GPU: one after another, stock first and last."""
    job = checked(**changed)
    return replace(job, groups=tuple((name,) for name in (*job.policies, STOCK_AGAIN)))


@pytest.mark.parametrize(("slower", "void"), [(1.01, False), (1.03, True), (0.97, True)])
def test_a_setting_where_stock_has_drifted_is_void(monkeypatch: pytest.MonkeyPatch, slower: float, void: bool) -> None:
    monkeypatch.setattr(Clocked, "slower", slower)
    results = alone(points=["8192x1"]).run(lambda unit, results: None)
    found = {(row["policy"], row["context"]): row for row in results["rows"]}
    assert {(row["context"], row["void"]) for row in found.values()} == {(EMPTY, False), (8192, void)}
    quest = found["quest:budget=2048", 8192]
    assert quest["drift"] == pytest.approx(slower - 1)
    # Over the mean of both.
    assert quest["speedup_over_stock"] == pytest.approx(26 * (1 + slower) / 2 / 14)
    # A file of before has no times of whole loops.
    old = {**results, "rows": [{name: row[name] for name in row if name != "ms_loop"} for row in results["rows"]]}
    for told in (results, old):
        assert "\n".join(printed(serving_table(told), 200)).count("void") == (3 if void else 0)


def test_rectified_policies_are_timed_in_whole_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in its period a row begins: one dense pass is in each."""
    monkeypatch.setattr(Clocked, "period", 5)
    monkeypatch.setattr(Clocked, "dense", 50.0)
    job = replace(alone(points=["8192x1"], steps=7), turn=7, periods={"quest:budget=2048": 5})
    rows = {(row["policy"], row["context"]): row for row in job.run(lambda unit, results: None)["rows"]}
    quest, stock = rows["quest:budget=2048", 8192], rows["stock", 8192]
    assert (quest["steps"], stock["steps"]) == (10, 7)
    assert quest["ms_per_token"] == pytest.approx(1e3 * (14 + 50 / 5) / 1024)
    assert stock["ms_per_token"] == pytest.approx(1e3 * 26 / 1024), "the median of single steps"


def test_a_run_that_was_cut_off_goes_on_with_what_is_missing() -> None:
    job, seen = alone(points=["8192x1", "4096x2"]), []

    def cut(unit: str, results: dict[str, Any]) -> None:
        seen.append(json.dumps(results))
        if len(seen) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(cut)
    before = json.loads(seen[-1])
    assert [row["policy"] for row in before["rows"]].count("quest:budget=2048") == 2
    Clocked.started.clear()
    units: list[str] = []
    whole = job.run(lambda unit, results: units.append(unit), before=before)
    assert Clocked.started == ["quest:budget=2048", "stock"] and len(units) == 6
    assert whole["rows"] == alone(points=["8192x1", "4096x2"]).run(lambda unit, results: None)["rows"]
    with pytest.raises(SaccadeError, match="of other settings"):
        alone(points=["8192x1"]).run(lambda unit, results: None, before=before)


def test_what_has_no_room_or_fails_is_left_out_and_said() -> None:
    results = alone(points=["30000x2", "8192x1"], policies=["streaming", "quest"]).run(lambda unit, results: None)
    assert {(row["policy"], row["context"]) for row in results["rows"]} == {
        (name, context) for name in ("stock", "quest:budget=2048", STOCK_AGAIN) for context in (EMPTY, 8192)
    }
    assert "streaming:budget=2048: failed, no such kernel" in results["notes"]
    assert "context 30000, batch 2, stock: left out, the cache has no room" in results["notes"]


@pytest.fixture
def _on_cuda(monkeypatch: pytest.MonkeyPatch, clocked: None) -> None:
    monkeypatch.setattr(grid, "pick_device", torch.device)
    monkeypatch.setattr(machine, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(engines, "copy_bandwidth", lambda device: 4100.0)
    monkeypatch.setattr(engines, "free_memory", lambda device: 2**37)


@pytest.mark.usefixtures("_on_cuda")
def test_a_device_that_is_too_small_is_refused_before_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 135 million weights of 2 bytes, and 30 layers of 3 heads with two times 64 numbers of 2 bytes."""
    job = checked(device="cuda", points=["8192x1"], memory=0.5)
    token, weights = 30 * 3 * 2 * 64 * 2, 134_515_008 * 2
    rows = -(-job.longest // 32) * 32 * token
    for free, words in (
        (weights + rows - token, f"rows of {rows // token - 32:,} tokens fit"),
        (weights + 32 * token, "rows of 32 tokens fit"),
        (weights - token, "no row fits"),
    ):
        monkeypatch.setattr(engines, "free_memory", lambda device, free=free: 2 * free)
        with pytest.raises(SaccadeError, match=words) as refused:
            job.run(lambda unit, results: None)
        assert "\n" not in str(refused.value) and "0.3 GB of weights" in str(refused.value)
    assert not Clocked.started
    monkeypatch.setattr(engines, "free_memory", lambda device: 2 * (weights + rows))
    assert job.run(lambda unit, results: None)["rows"]


@pytest.mark.usefixtures("_on_cuda")
def test_a_token_of_drafts_takes_its_share_of_a_cycle(monkeypatch: pytest.MonkeyPatch, fails: Fails) -> None:
    costs = Mock(wraps=serving.cost_of)
    monkeypatch.setattr(serving, "cost_of", costs)
    spec = "quest:budget=2048,rectify=8:verify"
    job = checked(device="cuda", points=["8192x1"], policies=["quest:rectify=8:verify"], draft_rate=0.9)
    assert (job.drafts, job.periods) == ({spec: 8}, {})
    plain = checked(device="cuda", points=["8192x1"])
    more = 1.25 * (1 - 0.9**9) / 0.1 - 1
    assert job.room - plain.room == math.ceil((8 + 2 * job.steps) * more) + serving.SPARE, "by chance, and a quarter"
    every = checked(device="cuda", points=["8192x1"], policies=["quest:rectify=8:verify"])
    assert every.room - plain.room == (8 + 2 * job.steps) * 8 + serving.SPARE, "a row gains nine tokens a round at most"
    results = job.run(lambda unit, results: None)
    rows = {(row["policy"], row["context"]): row for row in results["rows"]}
    drafts, stock = rows[spec, 8192], rows["stock", 8192]
    assert (drafts["tokens_per_cycle"], stock["tokens_per_cycle"]) == (5, None)
    assert drafts["ms_per_token"] == pytest.approx(1e3 * 14 / 1024 / 5)
    assert drafts["ms_fast"] == pytest.approx(drafts["ms_per_token"])
    assert drafts["speedup_over_stock"] == pytest.approx(5 * 26 / 14)
    with monkeypatch.context() as patched:
        patched.setattr(Clocked, "period", 4)
        patched.setattr(Clocked, "dense", 8.0)
        given = {"points": ["8192x1"], "policies": ["quest:rectify=8:verify"], "draft_rate": 0.9}
        adapted = checked(device="cuda", adaptive=True, **given).run(lambda unit, results: None)
    (row,) = (row for row in adapted["rows"] if (row["policy"], row["context"]) == (spec, 8192))
    # Every fourth cycle is longer: their mean, and the bytes of a dense step.
    assert (row["ms_per_token"], row["bytes"]) == (pytest.approx(1e3 * 16 / 1024 / 5), stock["bytes"])
    assert drafts["ms_loop"] == pytest.approx(drafts["ms_per_token"])
    (plain_row,) = (row for row in adapted["rows"] if (row["policy"], row["context"]) == ("stock", 8192))
    assert plain_row["ms_slow"] >= plain_row["ms_loop"] > plain_row["ms_per_token"], "a mean, of slow rounds too"
    assert Clocked.given[-2]["adaptive"] and not Clocked.given[1]["adaptive"]
    # Half of eight drafts stand.
    assert [call.kwargs["acceptance"] for call in costs.call_args_list[:6]] == [0, 0, 0.5, 0.5, 0, 0]
    assert [(one["name"], one["draft_rate"]) for one in Clocked.given[1:2]] == [(spec, 0.9)]
    assert "5.00" in "\n".join(printed(serving_table(results), 200))
    verified = {"device": "cuda", "policies": ["quest:rectify=8:verify"]}
    for words, given in (
        (r"draft-rate=1\.5 is not valid: from 0 to 1", {**verified, "draft_rate": 1.5}),
        (r"draft-rate=0\.5 is valid only beside drafts", {"draft_rate": 0.5}),
        ("adaptive is valid only beside drafts", {"adaptive": True}),
        ("rectify-together is valid only without drafts", {**verified, "rectify_together": True}),
    ):
        with pytest.raises(SaccadeError, match=words):
            checked(**given)
    given = ("bench", "serve", "--device", "cpu", "--policy", "tidal:reselect=7", "--policy", "quest", "--drafts", "4")
    assert "tidal:budget=2048,reselect=7,rectify=4:verify" in fails(*given)
    assert "quest:budget=2048,rectify=4:verify" in fails(*given[:4], *given[6:])


@pytest.mark.usefixtures("_on_cuda")
def test_on_cuda_engines_run_as_served_one_after_another() -> None:
    job = checked(device="cuda", points=["8192x4"], steps=None, block=None, tensor_parallel=2, max_model_len=131072)
    assert (job.steps, job.block, job.units) == (64, 16, 6)
    results = job.run(lambda unit, results: None)
    assert Clocked.started == ["stock", "quest:budget=2048", "stock"]
    for settings in Clocked.given:
        assert {"enforce_eager", "num_gpu_blocks_override", "kv_cache_memory_bytes"}.isdisjoint(settings)
        assert settings["gpu_memory_utilization"] == 0.9
        assert (settings["tensor_parallel_size"], settings["max_model_len"], settings["max_num_seqs"]) == (2, 131072, 4)
    assert results["notes"] == ["this H200 copies 4,100 GB/s, less than 4,200: others use it"]
    found = {(row["policy"], row["context"]): row for row in results["rows"]}
    empty, quest = found["stock", EMPTY], found["quest:budget=2048", 8192]
    # Two GPUs read their shares at once.
    assert quest["ideal_ms"] == pytest.approx(empty["ms_per_token"] + (quest["bytes"] - empty["bytes"]) / 8200e9 * 1e3)
    assert quest["steps"] == 64
    job = checked(device="cuda", points=["8192x4"], steps=None, block=None, quantization="fp8_per_tensor")
    (small, *_) = job.run(lambda unit, results: None)["rows"]
    assert [settings.get("quantization") for settings in Clocked.given] == [None] * 3 + ["fp8_per_tensor"] * 3
    # All weights but the head, which is the embedding too.
    assert empty["bytes"] - small["bytes"] == 134_515_008 - 49_152 * 576
