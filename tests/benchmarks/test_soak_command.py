"""`python -m benchmarks soak` from end to end on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.soak import Soak
from commands import Fails, Invoke
from saccade.recipes import machine

SMALL = ("--prompt", "80", "--tokens", "40", "--block", "10", "--window", "4")
POLICIES = ("--policy", "quest:page=4,budget=32", "--policy", "resa:page=4,min_pages=2,rectify=8")


@pytest.fixture(autouse=True)
def _no_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summing a gigabyte several times says nothing here."""
    monkeypatch.setattr(machine, "read_bandwidth", lambda device: 1.0)


def test_a_run_gives_tables_json_and_a_picture(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    files = tmp_path / "soak.json", tmp_path / "soak.svg"
    result = invoke("soak", "--model", model_folder, *SMALL, *POLICIES, "--json", files[0], "--picture", files[1])
    assert result.exit_code == 0, result.output
    results = json.loads(files[0].read_text())
    assert results["complete"] is True
    assert len(results["blocks"]) == 8
    assert set(results["steadiness"]) == {"quest:budget=32,page=4", "resa:page=4,min_pages=2,rectify=8"}
    assert all(name in result.stdout for name in ("ms per step", "keys and values", "Jaccard", "dense pass"))
    assert ElementTree.fromstring(files[1].read_text()).tag.endswith("svg")


@pytest.mark.parametrize(("left_out", "blocks", "watched"), [("--no-sets", 4, 0), ("--no-timed", 0, 1)])
def test_either_pass_can_be_left_out(
    invoke: Invoke, model_folder: Path, tmp_path: Path, left_out: str, blocks: int, watched: int
) -> None:
    file, picture = tmp_path / "soak.json", tmp_path / "soak.svg"
    arguments = (*SMALL, *POLICIES[:2], left_out, "--json", file, "--picture", picture)
    result = invoke("soak", "--model", model_folder, *arguments)
    assert result.exit_code == 0, result.output
    results = json.loads(file.read_text())
    assert (len(results["blocks"]), len(results["steadiness"])) == (blocks, watched)
    assert picture.is_file()


def test_an_interrupted_run_is_readable(
    invoke: Invoke, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(self: Soak, *arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Soak, "_watch", impatient)
    file, picture = tmp_path / "soak.json", tmp_path / "soak.svg"
    arguments = (*SMALL, *POLICIES, "--json", file, "--picture", picture)
    result = invoke("soak", "--model", model_folder, *arguments)
    assert result.exit_code == 130
    results = json.loads(file.read_text())
    assert results["complete"] is False
    assert len(results["blocks"]) == 8
    assert "interrupted" in result.stdout
    assert picture.is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tokens", "1600"), "1680 tokens, prompt and decoded: the model has 1600 positions"),
        (("--policy", "nonsense"), "unknown policy 'nonsense'"),
        (("--json", "/nowhere/soak.json"), "cannot be written"),
        (("--picture", "/nowhere/soak.svg"), "cannot be written"),
        (("--block", "0"), "greater than or equal to 1"),
    ],
)
def test_bad_input_is_one_line(fails: Fails, model_folder: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in fails("soak", "--model", model_folder, *SMALL, *arguments)
