"""Old libraries are named with what to install, before they fail in ways of their own."""

import importlib
import importlib.metadata
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import saccade
from projects import project
from saccade.adapters import hf
from saccade.checkpoints import versions
from saccade.cli.doctor import findings

OLD = [("torch", "2.5.1+cu124", "torch>=2.6"), ("transformers", "4.9.2", "transformers>=4.57")]


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, held: str) -> None:
    monkeypatch.setattr(versions, "version", lambda one: held if one == name else importlib.metadata.version(one))


def test_the_oldest_are_those_of_the_package() -> None:
    asked = {one.name: one.specifier for one in map(Requirement, project()["dependencies"])}
    for name, least in versions.LEAST.items():
        (lowest,) = (Version(one.version) for one in asked[name] if one.operator == ">=")
        assert lowest.release == least


@pytest.mark.parametrize(("name", "held", "wanted"), OLD)
def test_an_old_library_is_refused_when_models_are_needed(
    name: str, held: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, name, held)
    with pytest.raises(saccade.SaccadeError) as error:
        importlib.reload(hf)
    assert str(error.value) == f'{name} {held} is too old for saccade: pip install "{wanted}"'
    (line,) = (finding for finding in findings() if finding.name == "libraries")
    assert line.advice == str(error.value)


@pytest.mark.parametrize("held", ["2.6.0", "2.10.0a0+git1"])
def test_others_are_not(held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "torch", held)
    assert versions.outdated() is None


def test_the_command_line_says_it_in_one_line() -> None:
    code = """
import importlib.metadata, sys
held = importlib.metadata.version
importlib.metadata.version = lambda name: "4.9.2" if name == "transformers" else held(name)
from saccade.cli import main
sys.argv = ["saccade", "generate", "a prompt"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        'saccade: error: transformers 4.9.2 is too old for saccade: pip install "transformers>=4.57"\n'
    )
