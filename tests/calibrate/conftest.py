"""Tiny models that calibrations read from a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from searching import make_model


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
