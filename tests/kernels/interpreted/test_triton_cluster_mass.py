"""The kernels of attention mass in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from test_cluster_mass import expect_mass, queries, settings, some_tree

from saccade.kernels.cluster_mass import triton as kernels


@pytest.mark.parametrize("each", [False, True], ids=["kv", "query"])
@pytest.mark.parametrize("chunks", [False, True], ids=["tokens", "chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("clusters", "tokens"), [(16, 32), (64, 1024)], ids=["many programs", "few"])
def test_against_loops(
    clusters: int, tokens: int, dtype: torch.dtype, chunks: bool, each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "CLUSTERS", clusters)
    monkeypatch.setattr(kernels, "TOKENS", tokens)
    monkeypatch.setattr(kernels, "KEPT", clusters)
    expect_mass(queries(dtype), some_tree(dtype=dtype, chunks=chunks), settings(each=each), "triton")


def test_operands_of_two_types() -> None:
    expect_mass(queries(), some_tree(dtype=torch.float16), settings(), "triton")
