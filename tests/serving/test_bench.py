"""`saccade bench serve` and `python -m benchmarks serve` on real engines: small, and without a look at the clock."""

import gc
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import vllm
from engines import eight_bits, force_own_path, runner
from vllm import LLM

from benchmarks.__main__ import app
from benchmarks.serve.agent import AgentJob, AgentSettings
from benchmarks.serve.clients import ClientsJob, ClientsSettings
from benchmarks.serve.day import Day
from benchmarks.serve.day_rows import DayRow
from benchmarks.serve.rows import LoadRow
from commands import invoker
from saccade.adapters.vllm.cache_dtype import as_numbers
from saccade.adapters.vllm.options import ServeOptions
from saccade.bench.serving import ServingJob, ServingSettings
from saccade.bench.synthetic import SyntheticEngine
from saccade.bench.variants import STOCK_AGAIN
from saccade.bench.vllm_worker import SyntheticWorker
from saccade.checkpoints.bundled import model_path
from saccade.methods.policy import Policy

QUEST, TIDAL = "quest:budget=32", "tidal:budget=32,reselect=7"
SETTINGS: dict[str, Any] = {
    "shape": str(model_path()), "contexts": ["96"], "batches": ["1,2"], "threads": ["1"], "dtype": "float32",
    "device": "cpu", "policies": [QUEST, TIDAL], "budgets": ["2048"], "steps": 3, "block": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _collected_once() -> Iterator[None]:
    """vLLM collects garbage eight times for each engine: half of what these tests would take."""
    with patch.object(gc, "collect"):
        yield
    gc.collect()


def test_vllms_kernel_decodes_beside_other_baselines(tmp_path: Path) -> None:
    """Its attention is held against float64, and the model's logits against stock's, before anything is timed."""
    given = ("--shape", model_path(), "--context", "0,33", "--batch", "2", "--steps", "2", "--policy", "dense")
    result = invoker(app)("decode", *given, "--device", "cpu", "--json", tmp_path / "rows.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["runtime"] for row in rows] == ["transformers", "torch-sdpa", "vllm", "saccade"] * 2


def test_engines_one_after_another_as_on_a_gpu() -> None:
    """Points of their own, every engine alone, stock first and last; a policy that vLLM refuses costs only its rows."""
    settings = ServingSettings(**{**SETTINGS, "policies": [QUEST], "points": ["96x2", "40x1"], "steps": 2})
    job = replace(ServingJob.check(settings), groups=(("stock",), (QUEST,), (STOCK_AGAIN,)), turn=2, warm=8)
    done = list[str]()
    results = job.run(lambda unit, _: done.append(unit))
    assert len(done) == job.units == 12
    points = [(16, 2), (16, 1), (96, 2), (40, 1)]
    expected = [(point, name) for point in points for name in ("stock", QUEST, STOCK_AGAIN)]
    assert [((row["context"], row["batch"]), row["policy"]) for row in results["rows"]] == expected
    for row in results["rows"]:
        assert isinstance(row["drift"], float) and row["steps"] == 2 and row["ms_per_token"] > 0
    stock, quest, _ = results["rows"][6:9]
    assert quest["bytes"] < stock["bytes"]
    assert results["engines"]["stock"]["tokens"] >= 2 * 96 and results["notes"] == []
    # A run that is cut off has other engines' rows; going on starts only what is missing.
    cut = {**results, "rows": [row for row in results["rows"] if row["policy"] != QUEST]}
    done.clear()
    again = job.run(lambda unit, _: done.append(unit), before=cut)
    assert len(done) == 4 and all(QUEST in unit for unit in done)
    kept, now = (
        {(row["policy"], row["context"], row["batch"]): row["ms_per_token"] for row in found["rows"]}
        for found in (cut, again)
    )
    assert len(now) == 12 and kept.items() <= now.items()


@pytest.mark.parametrize("cache", ["auto", pytest.param("fp8", marks=eight_bits)])
def test_every_engine_stands_on_the_same_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that attend to everything decode what stock decodes from the same random keys, which stay as they were.

    `lychee_cluster` reads text, and finds the index of what was not prefilled in its first step.
    """
    force_own_path(monkeypatch)
    # The model's own weights: what an engine makes up is not the same in all versions, and may answer one token always.
    monkeypatch.setattr(vllm, "LLM", lambda **given: LLM(**{**given, "load_format": "auto"}))
    told, policies = [], ("quest:budget=512", f"{'streaming' if cache == 'fp8' else 'lychee_cluster'}:budget=512")
    sizes = {"max_model_len": 512, "max_num_seqs": 2, "max_num_batched_tokens": 128, "block_size": 32}
    room = {"num_gpu_blocks_override": 300, "kv_cache_memory_bytes": 2**28, "kv_cache_dtype": cache}
    given: dict[str, Any] = {"model": str(model_path()), "dtype": "float32", "enforce_eager": True, **sizes, **room}
    for options in (None, *(ServeOptions(Policy.from_spec(policy)) for policy in policies)):
        engine = SyntheticEngine(options, **given)
        assert engine.facts["attention"] == ["CPU_ATTN" if options is None else "CUSTOM"]
        caches = [layer.kv_cache for layer in runner(engine.llm).compilation_config.static_forward_context.values()]
        for held in caches:
            # As random as asked for, in 8 bits too.
            assert 0.9 < float(as_numbers(held, cache).float().std()) < 1.1
        filled = [cache.clone() for cache in caches]
        engine.begin(200, 2)
        # No prompt was run.
        assert all(cache.equal(before) for cache, before in zip(caches, filled, strict=True))
        answers, begun, ends = [], time.perf_counter(), []
        for _ in range(6):
            ends.append(engine.round())
            answers.append(engine.tokens[:])
        assert engine.gained == 1
        assert ends[-1] - ends[0] < 6 * engine.pace <= ends[-1] - begun, "the first round too"
        engine.end()
        engine.close()
        told.append(answers)
    assert told[1:] == [told[0]] * 2
    assert len({tuple(answer) for answer in told[0]}) > 1


def test_clients_and_agents_are_served_from_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rectified; three of four blocks of a prompt are shared, and the two first prompts fill them.

    The model has its own weights: the agents of one day are told codes, and some of their answers are right.
    """
    settings = {**SETTINGS, "contexts": ["256,128"], "batches": ["2"], "policies": ["resa"], "steps": None}
    clients = ClientsJob.check(ClientsSettings(**settings, new_tokens=4, shared=0.75, requests=6))
    # The same engines go through two days of two conversations.
    settings |= {"contexts": ["110,256"], "turns": 3, "answers": "20,40", "shared": 0.3}
    agents, days, loads = AgentJob.check(AgentSettings(**settings)), list[DayRow](), list[LoadRow]()
    settings |= {"contexts": ["150,260"], "turns": 2, "answers": "8,16", "shared": 0.0, "facts": True}
    job, own = AgentJob.check(AgentSettings(**settings)), AgentJob.measure

    def measure(job: AgentJob, engines: Any, point: int) -> Any:
        days.extend(own(agents, engines, 2))
        loads.extend(clients.measure(engines, 2))
        return own(job, engines, point)

    monkeypatch.setattr(AgentJob, "measure", measure)
    results = job.run(lambda unit, results: None)
    lengths = [Day(2, 3, 110, 256, 0.3, (20, 40), agents.vocabulary).lengths(number) for number in range(2)]
    for row in days:
        assert row.tokens == sum(answer for one in lengths for _, answer in one)
        assert row.prompt_tokens == [fmean(one[turn][0] for one in lengths) for turn in range(3)]
        assert 0 < row.alone_seconds <= row.decode_seconds < row.seconds and row.alone_tokens_per_second > 0
    cached = {row.policy: row.cached_tokens for row in days}
    # Whole blocks of 32: one that both begin with, then all up to the answer before, whose last token is not there yet.
    said = [fmean((sum(one[turn]) - 1) // 32 * 32 for one in lengths) for turn in range(2)]
    assert cached["stock"] == cached[STOCK_AGAIN] == [16, *said]
    # Answers of 32 tokens have a dense pass; of these shorter ones nothing is clean.
    clean = [fmean(one[turn][0] // 32 * 32 for one in lengths) for turn in range(2)]
    assert cached["resa"] == [16, *clean] != [16, *said]
    assert [row.policy for row in loads] == [row["policy"] for row in results["rows"]] == ["stock", "resa", STOCK_AGAIN]
    right = [row["right"] for row in results["rows"]]
    assert right[0] == right[2] and [len(turns) for turns in right[1]] == [2, 2]
    assert sum(map(sum, right[0])) > 0 and results["notes"] == []
    for row in loads:
        assert row.requests >= 6 and row.cached_share == 0.75 and row.requests_per_second > 0
        assert 0 < row.next_ms <= row.next_ms_p99 and 0 < row.first_ms <= row.first_ms_p99
        # Four tokens a request: a first one and three gaps, but for requests that were under way at either end.
        assert abs(row.gaps - 3 * row.firsts) <= 6


@pytest.mark.parametrize("inherited", [True, False])
def test_a_worker_that_inherits_the_extension_is_not_given_it_again(
    monkeypatch: pytest.MonkeyPatch, inherited: bool
) -> None:
    def started(**given: Any) -> Any:
        raise ValueError("worker_extension_cls" in given)

    monkeypatch.setattr(vllm, "LLM", started)
    worker = SyntheticWorker if inherited else object
    monkeypatch.setattr("saccade.adapters.vllm.worker.lossless.LosslessWorker", worker)
    options = ServeOptions(Policy.from_spec(f"{TIDAL},rectify=4:verify"))
    with pytest.raises(ValueError, match=str(not inherited)):
        SyntheticEngine(options, model=str(model_path()), max_num_seqs=2)


def test_the_model_is_left_out_of_model_runner_v2_too() -> None:
    worker, graphs = SyntheticWorker(), type("Graphs", (), {"run_pw_graph": lambda self, model, inputs: "graph"})()
    config = SimpleNamespace(get_hidden_size=lambda: 48, dtype=torch.bfloat16)
    worker.vllm_config = SimpleNamespace(model_config=config)
    model = SimpleNamespace(compute_logits=lambda hidden: "logits")
    worker.model_runner = runner = SimpleNamespace(model=model, cudagraph_manager=graphs)
    inputs = {"input_ids": torch.zeros(1000, dtype=torch.int32), "positions": None}
    worker.skip_model(True)
    answers = runner.model(**inputs), runner.cudagraph_manager.run_pw_graph(runner.model, inputs)
    for hidden in answers:
        assert (hidden.shape, hidden.dtype, hidden.untyped_storage().nbytes()) == ((1000, 48), torch.bfloat16, 2)
        assert not hidden.any()
    assert runner.model.compute_logits(answers[0]) == "logits"
    worker.skip_model(False)
    assert runner.model is model and runner.cudagraph_manager.run_pw_graph(model, inputs) == "graph"
