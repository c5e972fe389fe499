"""`python -m benchmarks kernels`: its rows and checks, and vLLM's kernel where it cannot run; no timing is judged."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import kernels, operations
from benchmarks.__main__ import app
from benchmarks.vllm_baseline import VLLM
from saccade.bench.decode import BenchJob, BenchSettings


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COLD", 2**20)


def measured(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    file = tmp_path / "kernels.json"
    small = ["--shape", "smollm2-135m", "--context", "200", "--budget", "32", "--rounds", "2", "--json", str(file)]
    result = CliRunner().invoke(app, ["kernels", *small, *arguments])
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def test_every_operation_is_timed_against_dense(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--batch", "2")
    names = {row["operation"] for row in rows}
    assert names == {operation.name for operation in operations.OPERATIONS}
    assert ("dense", "torch-sdpa") in {(row["operation"], row["implementation"]) for row in rows}
    dense = min(row["us"] for row in rows if row["operation"] == "dense")
    for row in rows:
        assert row["us_fast"] <= row["us"] <= row["us_slow"]
        assert row["over_dense"] == pytest.approx(row["us"] / dense)
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
    # Bytes are of the cache that must be read.
    found = {row["operation"]: row["bytes"] for row in rows}
    token = 2 * 2 * 3 * 64 * 2  # rows, keys and values, heads, head dim, bytes
    assert [found[name] // token for name in ("dense", "sparse tokens", "page scores")] == [200, 32, 13]
    assert not any(found[name] % token for name in ("dense", "sparse tokens", "page scores"))


def test_calls_go_round_in_all_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right, seen = operations.topk, []

    def watched(scores: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(scores.data_ptr())
        return right(scores, *arguments, **options)

    monkeypatch.setattr(operations, "topk", watched)
    measured(tmp_path, "--operation", "top-k", "--operation", "dense", "--rounds", "14")
    # 2^20 bytes hold seven caches of 200 tokens; the first call is the check's.
    assert len(set(seen[1:])) == 7


def test_an_implementation_that_refuses_is_left_out(tmp_path: Path) -> None:
    asked = ["--operation", "dense", "--implementation", "reference", "--implementation", "triton"]
    rows = measured(tmp_path, *asked, "--dtype", "float16")
    assert {row["implementation"] for row in rows} == {"reference", "torch-sdpa"}


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = operations.topk

    def wrong(*arguments: Any, **options: Any) -> Any:
        ids, counts = right(*arguments, **options)
        return ids.roll(1, -1), counts

    monkeypatch.setattr(operations, "topk", wrong)
    result = CliRunner().invoke(app, ["kernels", "--context", "200", "--budget", "32", "--operation", "top-k"])
    assert result.exit_code == 2 and "top-k differ from float64" in result.stderr


SETTINGS = BenchSettings("smollm2-135m", ["64"], ["1"], ["1"], "float32", "cpu", ["dense"], ["16"], 2, [])


def test_vllms_kernel_is_left_out_without_it_and_takes_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    job = BenchJob.check(SETTINGS, [VLLM])
    assert [one.name for one in job.baselines] == ["transformers", "torch-sdpa"]
    assert "baseline vllm is left out: vLLM is not installed (make setup-vllm)" in job.notes
    assert VLLM.refusal(torch.device("cuda"), 64) == "its CPU kernel is what can be called without an engine"
