"""What a cluster index is told: sizes that follow from others, what is refused, and the plan of `lychee_cluster`."""

from __future__ import annotations

import pytest

from saccade.errors import PolicyError
from saccade.methods.lychee_cluster import LycheeClusterOptions, plan
from saccade.methods.options import parse_options
from saccade.selection.clusters.selector import ClusterSelector
from saccade.types import ModelShape, Role


def test_default_buffers() -> None:
    assert ClusterSelector().capacity == 128
    assert ClusterSelector(budget=256).capacity == 64
    assert ClusterSelector(budget=40).capacity == 8
    assert ClusterSelector(budget=33).capacity == 1
    assert ClusterSelector(budget=256, every=100).capacity == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 32}, "budget=32 cannot hold 16 sinks, a chunk and 1 more; the smallest is 33"),
        ({"budget": 63, "every": 32}, "the smallest is 64"),
        (
            {"budget": 100, "buffer": 69},
            "budget=100 cannot hold 16 sinks, a chunk and a buffer of 69; the smallest is 101",
        ),
        ({"buffer": 0}, "buffer=0 is not valid; the smallest is 1"),
        ({"buffer": 31, "every": 32}, "buffer=31 holds fewer tokens than the 32 between rectifications"),
        ({"chunk_min": 17}, "chunk_max=16 is not valid; the smallest is 17"),
        ({"chunk_min": 0}, "chunk_min=0 is not valid; the smallest is 1"),
        ({"sinks": -1}, "sinks=-1 is not valid; the smallest is 0"),
        ({"cluster_size": 9}, "cluster_size=9 is not valid; 1 to 8 are"),
        ({"k_g": 0}, "k_g=0 is not valid; the smallest is 1"),
        ({"coarse": "64"}, "coarse='64' is not valid; use sqrt or cap64"),
    ],
)
def test_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        ClusterSelector(**options)


def test_coarse_units() -> None:
    assert [ClusterSelector().units(count) for count in (1, 2, 4, 5, 4096, 10**6)] == [1, 2, 2, 3, 64, 64]
    assert [ClusterSelector(coarse="cap64").units(count) for count in (1, 63, 64, 65)] == [1, 63, 64, 64]


@pytest.mark.parametrize(("clusters", "units"), [(1, 1), (2, 2), (5, 3), (4096, 64), (4097, 65), (50_000, 224)])
def test_coarse_units_without_a_limit(clusters: int, units: int) -> None:
    """The paper's growth with the root of the context; sqrt is the same up to 64 units."""
    assert ClusterSelector(coarse="root").units(clusters) == units
    assert ClusterSelector(coarse="sqrt").units(clusters) == min(units, 64)
    assert ClusterSelector(coarse="cap64").units(clusters) == min(clusters, 64)


SHAPE = ModelShape(layers=4, query_heads=4, kv_heads=2, head_dim=8)


def test_the_plan() -> None:
    options = parse_options("lychee_cluster", LycheeClusterOptions, {"budget": 512, "rectify": 32})
    made = plan(options, SHAPE)
    assert made.selector == ClusterSelector(budget=512, every=32)
    assert made.roles.layers == ((Role.DENSE,) * 2,) * 2 + ((Role.SELECT,) * 2,) * 2
    assert LycheeClusterOptions.model_validate(options.model_dump(mode="json")) == options


def test_options_say_what_is_wrong() -> None:
    with pytest.raises(PolicyError, match=r"policy lychee_cluster: budget=32 cannot hold 16 sinks, .* smallest is 33"):
        parse_options("lychee_cluster", LycheeClusterOptions, {"budget": 32})
