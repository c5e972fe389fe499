"""The kernels of attention mass in Triton's interpreter."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from test_cluster_mass import expect_mass, queries, settings, some_tree

from saccade.kernels.cluster_mass import triton as kernels
from walking import in_turn


@pytest.mark.parametrize(("sizes", "dtype"), in_turn([(16, 32), (64, 1024)], [torch.float32, torch.float16]))
def test_against_loops(sizes: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SETS", sizes[0])
    monkeypatch.setattr(kernels, "TOKENS", sizes[1])
    for grouped, each in product((True, False), repeat=2):
        expect_mass(queries(dtype), some_tree(dtype=dtype, grouped=grouped), settings(each=each), "triton")


def test_operands_of_two_types() -> None:
    expect_mass(queries(), some_tree(dtype=torch.float16), settings(), "triton")
