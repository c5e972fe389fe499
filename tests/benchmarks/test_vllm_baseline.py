"""Where vLLM's kernel cannot run, it is left out and a line says why."""

import importlib.util

import pytest
import torch

from benchmarks.vllm_baseline import VLLM
from saccade.bench.decode import BenchJob, BenchSettings

SETTINGS = BenchSettings("smollm2-135m", ["64"], ["1"], ["1"], "float32", "cpu", ["dense"], ["16"], 2, [])


def test_it_is_left_out_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    job = BenchJob.check(SETTINGS, [VLLM])
    assert [one.name for one in job.baselines] == ["transformers", "torch-sdpa"]
    assert "baseline vllm is left out: vLLM is not installed (make setup-vllm)" in job.notes


def test_it_takes_no_accelerator() -> None:
    assert VLLM.refusal(torch.device("cuda"), 64) == "its CPU kernel is what can be called without an engine"
