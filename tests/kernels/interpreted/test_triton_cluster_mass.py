"""The kernels of attention mass in Triton's interpreter."""

import pytest
import torch
from test_cluster_mass import (
    expect_mass,
    queries,
    settings,
    some_tree,
    test_against_loops,  # noqa: F401 - of the kernels
)

from saccade.kernels.cluster_mass import triton as kernels


@pytest.fixture(autouse=True, params=[(16, 32), (64, 1024)])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets and tokens of a program: several programs, or one."""
    monkeypatch.setattr(kernels, "SETS", request.param[0])
    monkeypatch.setattr(kernels, "TOKENS", request.param[1])


def test_operands_of_two_types() -> None:
    expect_mass(queries(), some_tree(dtype=torch.float16), settings(), "triton")
