"""What a cluster index is told: sizes that follow from others, what is refused, and the plan of `lychee_cluster`."""

import pytest

from saccade.errors import PolicyError
from saccade.methods.lychee_cluster import METHOD, LycheeClusterOptions
from saccade.methods.policy import policy
from saccade.selection.clusters.mass_selector import ChunkSelector
from saccade.selection.clusters.selector import ClusterSelector
from saccade.types import ModelShape, Role


def test_default_buffers() -> None:
    assert ClusterSelector().capacity == 128
    assert ClusterSelector(budget=256).capacity == 64
    assert ClusterSelector(budget=60).capacity == 13
    assert ClusterSelector(budget=48).capacity == 1
    assert ClusterSelector(budget=200, every=100).capacity == 50
    assert ClusterSelector(budget=160, every=100).capacity == 13


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 47}, "budget=47 cannot hold 16 sinks, a chunk, 1 more and the up to 15 .*; the smallest is 48"),
        ({"budget": 79, "every": 32}, "up to 47 last tokens that are in no chunk yet; the smallest is 80"),
        ({"budget": 100, "buffer": 54}, "16 sinks, a chunk, a buffer of 54 and the up to 15 .* the smallest is 101"),
        ({"chunk_min": 17}, "chunk_max=16 is not valid; the smallest is 17"),
    ],
)
def test_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        ClusterSelector(**options)


def test_coarse_units() -> None:
    assert [ClusterSelector().units(count) for count in (1, 2, 4, 5, 4096, 10**6)] == [1, 2, 2, 3, 64, 64]


SHAPE = ModelShape(layers=4, query_heads=4, kv_heads=2, head_dim=8)


def test_the_plan() -> None:
    options = policy("lychee_cluster", budget=512, rectify=32).options
    made = METHOD.plan(options, SHAPE)
    assert made.selector == ChunkSelector(budget=512, every=32, replant=16, spread=3)
    paper = policy("lychee_cluster", budget=512, form="paper", cluster_size=4).options
    assert METHOD.plan(paper, SHAPE).selector == ClusterSelector(budget=512, cluster_size=4)
    assert made.roles.layers == ((Role.DENSE,) * 2,) * 2 + ((Role.SELECT,) * 2,) * 2
    assert LycheeClusterOptions.model_validate(options.model_dump(mode="json")) == options


def test_what_is_always_attended_to_fits_beside_a_chunk() -> None:
    """At every length and phase of a rectification, for the smallest budgets too."""
    for every in (0, 5):
        for buffer in (None, 1, 9):
            smallest = 16 + (buffer or 1) + every + 15 + 16
            selector = ClusterSelector(budget=smallest, buffer=buffer, every=every)
            for length in range(smallest + 1, smallest + 200):
                for unclean in range(every + 1):
                    stop = selector.stop(length, length - 1 - unclean)
                    assert selector.always(length, stop) + 16 <= smallest or stop < 32
                    assert stop % selector.capacity == 0


def test_replant() -> None:
    selector = policy("lychee_cluster", form="paper", replant=64).options.selector
    assert isinstance(selector, ClusterSelector) and selector.replant == 64
    with pytest.raises(
        PolicyError, match="replant='none' is not valid: it is the method lazy_clusters of `claims` now"
    ):
        policy("lychee_cluster", replant="none")
