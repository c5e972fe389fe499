"""`python -m benchmarks growth` from end to end at small contexts."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.growth import SELECTORS
from commands import Fails, Invoke
from saccade.recipes import machine

CONTEXTS = (300, 600, 900)
SMALL = ("--context", "300,600,900", "--budget", "64", "--head-dim", "8", "--rounds", "2")


@pytest.fixture(autouse=True)
def _no_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summing a gigabyte several times says nothing here."""
    monkeypatch.setattr(machine, "read_bandwidth", lambda device: 1.0)


def test_a_run_gives_a_table_json_and_a_picture(invoke: Invoke, tmp_path: Path) -> None:
    files = tmp_path / "growth.json", tmp_path / "growth.svg"
    result = invoke("growth", *SMALL, "--json", files[0], "--picture", files[1])
    assert result.exit_code == 0, result.output
    results = json.loads(files[0].read_text())
    assert results["complete"] is True
    found = {(row["context"], row["selector"]): row for row in results["rows"]}
    assert set(found) == set(product(CONTEXTS, SELECTORS)) and len(results["rows"]) == 18
    lines = [line.split() for line in result.stdout.splitlines()]
    for context in CONTEXTS:
        times, nodes = ([f"{found[context, name][key]:,.0f}" for name in SELECTORS] for key in ("us", "visited"))
        assert [f"{context:,}", *times, *nodes] in lines
    fits = [fit[kind]["slope"] for kind in ("time", "visited") for fit in results["exponents"]]
    (printed,) = (line[1:] for line in lines if line[:1] == ["exponent"])
    assert [cell.partition("±")[0] for cell in printed] == [f"{slope:.2f}" for slope in fits]
    assert ElementTree.fromstring(files[1].read_text()).tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--selector", "tree"), "cap64, sqrt, root, quest, exact"),
        (("--context", "64"), "nothing is chosen"),
        (("--context", ""), "whole numbers"),
        (("--dtype", "int8"), "float32, bfloat16, float16"),
        (("--rounds", "0"), "greater than or equal to 1"),
        (("--json", "/nowhere/growth.json"), "cannot be written"),
    ],
)
def test_bad_input_is_one_line(fails: Fails, arguments: tuple[str, ...], says: str) -> None:
    assert says in fails("growth", *SMALL, *arguments)
