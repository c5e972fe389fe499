"""`python -m benchmarks growth` from end to end at small contexts."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from benchmarks.growth import SELECTORS
from commands import Invoke, told

CONTEXTS = (300, 600, 900)
SMALL = ("--context", "300,600,900", "--budget", "64", "--head-dim", "8", "--rounds", "2")


def test_a_run_gives_a_table_json_and_a_picture(invoke: Invoke, tmp_path: Path) -> None:
    files = tmp_path / "growth.json", tmp_path / "growth.svg"
    result = invoke("growth", *SMALL, "--json", files[0], "--picture", files[1])
    results = told(result, *files)
    found = {(row["context"], row["selector"]): row for row in results["rows"]}
    assert set(found) == set(product(CONTEXTS, SELECTORS)) and len(results["rows"]) == 18
    lines = [line.split() for line in result.stdout.splitlines()]
    for context in CONTEXTS:
        times, nodes = ([f"{found[context, name][key]:,.0f}" for name in SELECTORS] for key in ("us", "visited"))
        assert [f"{context:,}", *times, *nodes] in lines
    fits = [fit[kind]["slope"] for kind in ("time", "visited") for fit in results["exponents"]]
    (printed,) = (line[1:] for line in lines if line[:1] == ["exponent"])
    assert [cell.partition("±")[0] for cell in printed] == [f"{slope:.2f}" for slope in fits]
