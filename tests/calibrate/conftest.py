"""Tiny models that calibrations read from a folder, and less text than there is."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from searching import make_model

from adapters import tiny
from commands import first_alone, tokenizer
from saccade.adapters.hf import probe
from saccade.calibrate import layers, problems
from saccade.calibrate.passages import Texts
from saccade.checkpoints.load import ModelSource
from saccade.report.drawing import as_svg

__all__ = ["tokenizer"]


@pytest.fixture(scope="module", autouse=True)
def little_text() -> Iterator[None]:
    """Each tokenizer is read, and counts the tokens that problems are cut from, once; and one search of a file draws.

    What the probe tells, in texts of a hundred tokens and few steps; random weights need none that a nat tells.
    """
    few = Texts.passages
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problems, "CHARACTERS", 100_000)
        patch.setattr(problems, "token_ends", functools.cache(problems.token_ends))
        patch.setattr(ModelSource, "tokenizer", functools.cache(ModelSource.tokenizer))
        for module in ("heads", "layers"):
            patch.setattr(f"saccade.report.{module}.as_svg", first_alone(as_svg))
        for name, value in {"TOLD": 12, "SHORT": 16, "KEY": 0.01}.items():
            patch.setattr(probe, name, value)
        patch.setattr(layers, "WALK", 6)
        patch.setitem(probe.Probe.__init__.__kwdefaults__, "walks", (1, 6))
        patch.setattr(Texts, "passages", lambda texts, tokenizer, count: few(texts, tokenizer, min(count, 5)))
        yield


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
