"""Tiny models that calibrations read from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from searching import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many KV heads as query heads."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("grouped"), kv_heads=2)
