"""`python -m benchmarks growth`: what is built, what is counted, what is fitted; no timing is judged here."""

from itertools import product
from typing import Any

import numpy
import pytest
import torch
from click.testing import Result

from benchmarks import growth
from benchmarks.__main__ import app
from benchmarks.growth import SELECTORS, Growth, GrowthSettings, exponent, nodes_visited, one_head, synthetic_keys
from commands import invoker, told
from trees import beside

CONTEXTS = (600, 1200, 2400)


def growth_of(**changes: Any) -> Growth:
    chosen = {"contexts": "600", "selectors": "quest", "budget": 96, "head_dim": 16}
    rest = {"group": 2, "rounds": 2, "threads": 1, "dtype": "float32", "seed": 0}
    return Growth.check(GrowthSettings(**{**chosen, **rest, **changes}))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("growth")
    files, small = (folder / "growth.json", folder / "growth.svg"), "--budget 96 --head-dim 16 --rounds 2".split()
    result = invoker(app)("growth", "--context", "600,1200,2400", *small, "--json", files[0], "--picture", files[1])
    return result, told(result, *files)


@pytest.fixture
def rows(ran: tuple[Result, dict[str, Any]]) -> dict[tuple[int, str], dict[str, Any]]:
    return {(row["context"], row["selector"]): row for row in ran[1]["rows"]}


def test_a_table_shows_every_context_and_selector(
    ran: tuple[Result, dict[str, Any]], rows: dict[tuple[int, str], dict[str, Any]]
) -> None:
    assert list(rows) == list(product(CONTEXTS, SELECTORS)) and len(ran[1]["rows"]) == 18
    assert all(row["rounds"] == 2 and row["us_fast"] <= row["us"] <= row["us_slow"] for row in rows.values())
    lines = [line.split() for line in ran[0].stdout.splitlines()]
    for context in CONTEXTS:
        times, nodes = ([f"{rows[context, name][key]:,.0f}" for name in SELECTORS] for key in ("us", "visited"))
        assert [f"{context:,}", *times, *nodes] in lines
    fits = [fit[kind]["slope"] for kind in ("time", "visited") for fit in ran[1]["exponents"]]
    (printed,) = (line[1:] for line in lines if line[:1] == ["exponent"])
    assert [cell.partition("±")[0] for cell in printed] == [f"{slope:.2f}" for slope in fits]


def test_nodes_are_counted_and_equal_indexes_built_once(rows: dict[tuple[int, str], dict[str, Any]]) -> None:
    for context in CONTEXTS:
        visited = {name: rows[context, name]["visited"] for name in SELECTORS}
        assert (visited["exact"], visited["quest"]) == (context, -(-context // 16))
        clusters = -(-((context - 1 - 16) // 12) // 2)
        # All units and some of the clusters; below 4,096 clusters sqrt has no limit to lift.
        assert 64 if clusters > 64 else clusters < visited["cap64"] <= 64 + clusters
        assert visited["sqrt"] == visited["root"] < visited["cap64"]
    assert [at for at, row in rows.items() if row["shared_index"]] == [(context, "root") for context in CONTEXTS]
    assert all(row["index_share"] > 0 for (_, name), row in rows.items() if name != "exact")


@pytest.mark.parametrize(("name", "units", "k_g"), [("cap64", 64, 3), ("groups", 16, None)])
def test_nodes_visited_are_units_and_the_clusters_of_those_kept(name: str, units: int, k_g: int | None) -> None:
    """Against a plain reading of the tree in float64."""
    settings: Any = growth_of(k_g=k_g).selector(name)
    kv = one_head(synthetic_keys(3000, 16, seed=3))
    query, tree = torch.randn(2, 16), growth.tree_of(beside(settings).of(0, kv))
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
    assert numpy.mean(keys[1:] * keys[:-1]) == pytest.approx(growth._CORRELATION, abs=0.05)
    assert numpy.mean(keys[100:] * keys[:-100]) == pytest.approx(0, abs=0.05)
    assert torch.equal(synthetic_keys(50, 4, seed=1), synthetic_keys(50, 4, seed=1))


def test_an_exponent_is_fitted() -> None:
    rows = [{"context": 2**n, "us": 7 * 2 ** (0.5 * n)} for n in range(13, 21)]
    assert exponent(rows, "us") == pytest.approx({"slope": 0.5, "standard_error": 0}, abs=1e-9)
    assert exponent(rows[:2], "us") is None


def test_an_interrupted_run_is_readable() -> None:
    def impatient(what: str) -> None:
        if what == "round 1 of 2":
            raise KeyboardInterrupt

    measurement = growth_of()
    with pytest.raises(KeyboardInterrupt):
        measurement.run(impatient)
    assert measurement.units == 1 + 2 and [row["rounds"] for row in measurement.results()["rows"]] == [1]
