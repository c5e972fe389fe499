"""`python -m benchmarks growth`: what is built, what is counted, what is fitted; no timing is judged here."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest
import torch

from benchmarks import growth
from benchmarks.growth import Growth, GrowthSettings, exponent, nodes_visited, one_head, synthetic_keys, tree_of
from saccade.errors import PolicyError
from trees import beside

CONTEXTS = (600, 1200, 2400)


def growth_of(**changes: Any) -> Growth:
    chosen = {"contexts": "600,1200,2400", "selectors": "cap64,sqrt,root,quest,exact", "budget": 96, "head_dim": 16}
    rest = {"group": 2, "rounds": 2, "threads": 1, "dtype": "float32", "seed": 0}
    return Growth.check(GrowthSettings(**{**chosen, **rest, **changes}))


@pytest.fixture(scope="module")
def finished() -> dict[str, Any]:
    measurement = growth_of()
    units: list[str] = []
    measurement.run(units.append)
    assert len(units) == measurement.units == 17
    results: dict[str, Any] = json.loads(json.dumps(measurement.results(), allow_nan=False))
    return results


def test_every_context_and_selector_is_a_row(finished: dict[str, Any]) -> None:
    rows = [(row["context"], row["selector"]) for row in finished["rows"]]
    assert rows == [(context, name) for context in CONTEXTS for name in ("cap64", "sqrt", "root", "quest", "exact")]
    assert all(row["rounds"] == 2 and row["us_fast"] <= row["us"] <= row["us_slow"] for row in finished["rows"])


def test_nodes_are_counted(finished: dict[str, Any]) -> None:
    visited = {(row["context"], row["selector"]): row["visited"] for row in finished["rows"]}
    for context in CONTEXTS:
        assert visited[context, "exact"] == context
        assert visited[context, "quest"] == -(-context // 16)
        chunks = (context - 1 - 16) // 12
        clusters = -(-chunks // 2)
        # All units and some of the clusters; below 4,096 clusters sqrt has no limit to lift.
        assert 64 if clusters > 64 else clusters < visited[context, "cap64"] <= 64 + clusters
        assert visited[context, "sqrt"] == visited[context, "root"] < visited[context, "cap64"]
    exponents = {fit["selector"]: fit["visited"] for fit in finished["exponents"]}
    assert exponents["exact"]["slope"] == pytest.approx(1)
    assert exponents["exact"]["standard_error"] == pytest.approx(0, abs=1e-6)


def test_equal_indexes_are_built_once(finished: dict[str, Any]) -> None:
    shared = {(row["context"], row["selector"]): row["shared_index"] for row in finished["rows"]}
    assert all(shared[context, "root"] for context in CONTEXTS)
    assert sum(shared.values()) == len(CONTEXTS)
    assert all(row["index_share"] > 0 for row in finished["rows"] if row["selector"] != "exact")


def test_the_limit_of_64_units_is_lifted_by_root_only() -> None:
    chosen = growth_of()
    units = {name: [chosen.selector(name).units(n) for n in (1, 4096, 4097)] for name in ("cap64", "sqrt", "root")}  # type: ignore[attr-defined]  # only clusters have units
    assert units == {"cap64": [1, 64, 64], "sqrt": [1, 64, 64], "root": [1, 64, 65]}


@pytest.mark.parametrize(("name", "units", "k_g"), [("cap64", 64, 3), ("cap64", 64, None), ("groups", 16, None)])
def test_nodes_visited_are_units_and_the_clusters_of_those_kept(name: str, units: int, k_g: int | None) -> None:
    """Against a plain reading of the tree in float64."""
    settings: Any = growth_of(k_g=k_g).selector(name)
    kv = one_head(synthetic_keys(3000, 16, seed=3))
    query, tree = torch.randn(2, 16), tree_of(beside(settings).of(0, kv))
    mean = query.double().mean(0)
    best = sorted(
        (unit for unit, held in enumerate(tree.unit_tokens[0, 0].tolist()) if held),
        key=lambda unit: (
            -float(tree.unit_centroids[0, 0, unit].double() @ mean + mean.norm() * tree.unit_radii[0, 0, unit].double())
        ),
    )
    tokens, clusters = 0, 0
    for place, unit in enumerate(best):
        if tokens >= 4 * 96 if k_g is None else place >= k_g:
            break
        tokens += int(tree.unit_tokens[0, 0, unit])
        clusters += int(tree.unit_offsets[0, 0, unit + 1] - tree.unit_offsets[0, 0, unit])
    assert nodes_visited(tree, 96, query, k_g) == units + clusters
    assert 0 < clusters < tree.radii.shape[2]


def test_neighbouring_keys_are_alike_and_distant_ones_are_not() -> None:
    keys = synthetic_keys(20_000, 4, seed=0).double().numpy()
    assert keys.std() == pytest.approx(1, abs=0.05)
    near = numpy.mean(keys[1:] * keys[:-1])
    far = numpy.mean(keys[100:] * keys[:-100])
    assert near == pytest.approx(growth._CORRELATION, abs=0.05)
    assert far == pytest.approx(0, abs=0.05)
    assert torch.equal(synthetic_keys(50, 4, seed=1), synthetic_keys(50, 4, seed=1))


def test_an_exponent_is_fitted() -> None:
    rows = [{"context": 2**n, "us": 7 * 2 ** (0.5 * n)} for n in range(13, 21)]
    assert exponent(rows, "us") == pytest.approx({"slope": 0.5, "standard_error": 0}, abs=1e-9)
    assert exponent(rows[:2], "us") is None


def test_an_interrupted_run_is_readable() -> None:
    def impatient(what: str) -> None:
        if what == "round 1 of 2":
            raise KeyboardInterrupt

    measurement = growth_of(contexts="600", selectors="quest")
    with pytest.raises(KeyboardInterrupt):
        measurement.run(impatient)
    results = measurement.results()
    assert [row["rounds"] for row in results["rows"]] == [1]


@pytest.mark.parametrize(("selectors", "budget"), [("sqrt", 20), ("quest", 15)])
def test_a_budget_that_is_too_small_is_refused_before_any_run(selectors: str, budget: int) -> None:
    with pytest.raises(PolicyError, match=f"budget={budget}"):
        growth_of(selectors=selectors, budget=budget)
