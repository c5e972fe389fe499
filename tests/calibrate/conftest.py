"""Tiny models that calibrations read from a folder, and less text than there is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from searching import make_model

from adapters import tiny
from commands import first_alone, tokenizer
from saccade.adapters.hf import probe
from saccade.calibrate import layers, problems
from saccade.calibrate.passages import Texts
from saccade.report.drawing import as_svg

__all__ = ["tokenizer"]


@pytest.fixture(scope="module", autouse=True)
def small_library() -> Iterator[None]:
    """Every source of problems counts its tokens anew, and every search draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problems, "CHARACTERS", 100_000)
        for module in ("heads", "layers"):
            patch.setattr(f"saccade.report.{module}.as_svg", first_alone(as_svg))
        yield


@pytest.fixture(autouse=True)
def short_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the probe tells, in texts of a hundred tokens and few steps; random weights need none that a nat tells."""
    for name, value in {"TOLD": 12, "SHORT": 16, "KEY": 0.01}.items():
        monkeypatch.setattr(probe, name, value)
    monkeypatch.setattr(layers, "WALK", 6)
    monkeypatch.setitem(probe.Probe.__init__.__kwdefaults__, "walks", (1, 6))
    few = Texts.passages
    monkeypatch.setattr(Texts, "passages", lambda texts, tokenizer, count: few(texts, tokenizer, min(count, 5)))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.fresh("llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many KV heads as query heads."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("grouped"), kv_heads=2)


@pytest.fixture
def one_process() -> Iterator[None]:
    """What workers would run, nobody here would see."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
